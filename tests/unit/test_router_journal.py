"""The laws of the journal: a sequence moves by its table only, and can be rebuilt from its record alone."""

from __future__ import annotations

from array import array

import pytest

from router_proc.journal import ENDS, MOVES, IllegalMove, Journal, Sequence, State, rebuild
from router_proc.outbox import Tokenizer
from tests.unit.router_world import ids_of, params
from wire.link import Peer
from wire.messages import SequenceLogprobs, Submit, TokenLogprobs, decoder, encoder

RID = 5 << 8
TOKENIZER = Tokenizer(Peer("tokenizer", 0, 1, b"tokenizer.0.1", 1, 1))


def opened(n: int = 1, tokens: int = 300, **fields: object) -> tuple[Journal, list[Sequence]]:
    journal = Journal()
    submit = Submit(RID, 0, n, "tenant", params(50, seed=77), "session", "user", b"h" * 16, 2.0, b"context")
    keys = b"k" * 32 * (tokens // 128)
    prompt = journal.open(submit, ids_of(*range(tokens)), keys, TOKENIZER, 10.0)
    return journal, prompt.live


def test_every_state_has_its_moves_and_ends_are_final() -> None:
    assert MOVES.keys() == set(State)
    for state, moves in MOVES.items():
        final = state in ENDS | {State.FINISHED}
        assert bool(moves) != final
        if not final:
            assert moves >= ENDS, "a sequence can be aborted and can fail in any state"
    assert State.FINISHED in MOVES[State.DECODE]
    assert State.RESUMING in MOVES[State.QUEUED] & MOVES[State.PREFILL] & MOVES[State.DECODE] & MOVES[State.PREEMPTED]


@pytest.mark.parametrize("state", list(State))
def test_a_move_that_the_table_lacks_is_refused(state: State) -> None:
    _, (sequence,) = opened()
    for target in State:
        sequence.state = state
        if target in MOVES[state]:
            sequence.move(target)
            assert sequence.state is target
        else:
            with pytest.raises(IllegalMove):
                sequence.move(target)
            assert sequence.state is state


def test_choices_share_their_prompt() -> None:
    journal, sequences = opened(n=3)
    assert [sequence.sid for sequence in sequences] == [RID, RID + 1, RID + 2]
    assert len({id(sequence.prompt) for sequence in sequences}) == 1
    prompt = sequences[0].prompt
    assert (prompt.tokens, prompt.received, prompt.deadline) == (300, 10.0, 12.0)
    assert journal.prompt_bytes == 4 * 300 + 64
    for sequence in list(sequences):
        assert journal.size() == 4 * 300 + 64
        journal.close(sequence)
    journal.check()
    assert journal.size() == 0


def test_a_sequence_is_rebuilt_from_its_record() -> None:
    """What a rank gets for the next attempt is what the first one got, plus the ids produced since."""
    _, (first, second) = opened(n=2)
    second.produced.extend([7, -1, 2**31 - 1])
    second.attempt = 3
    submit, (ids, keys, produced) = rebuild(second)
    assert decoder.decode(encoder.encode(submit)) == submit
    assert (submit.sid, submit.attempt, submit.n, submit.tenant) == (RID + 1, 3, 1, "tenant")
    assert submit.params == params(50, seed=77)
    assert array("i", ids).tolist() == list(range(300))
    assert keys == b"k" * 64
    assert array("i", produced).tolist() == [7, -1, 2**31 - 1]
    assert (submit.timeout, submit.render_context) == (0.0, b""), "deadline and render context are not the engine's"
    assert rebuild(first)[1][2] == b""
    assert first.prompt.submit.render_context == b"context"


def test_logprob_records_are_kept_until_they_are_acknowledged() -> None:
    _, (sequence,) = opened()
    one = TokenLogprobs(-1.0, [], [])
    sequence.logprobs = [
        SequenceLogprobs(RID, 0, [one] * 2),
        SequenceLogprobs(RID, 2, [one]),
        SequenceLogprobs(RID, 3, [one]),
    ]
    sequence.acknowledge(1)
    assert [item.offset for item in sequence.logprobs] == [0, 2, 3]
    sequence.acknowledge(3)
    assert [item.offset for item in sequence.logprobs] == [3]
    sequence.acknowledge(4)
    assert sequence.logprobs == []


@pytest.mark.parametrize(
    ("frames", "changes"),
    [
        ([], {}),
        ([b"1234"], {}),
        ([b"1234", b"", b""], {}),
        ([b"", b""], {}),
        ([b"12345", b""], {}),
        ([b"1234", b"x"], {}),
        ([b"1234" * 127, b"k" * 32], {}),
        ([b"1234" * 255, b"k" * 64], {}),
        ([b"1234", b""], {"n": 0}),
        ([b"1234", b""], {"n": 257}),
        ([b"1234", b""], {"n": 10**9}),
        ([b"1234", b""], {"sid": RID | 200, "n": 57}),
        ([b"1234", b""], {"sid": -256}),
        ([b"1234", b""], {"params": params(0)}),
        ([b"1234", b""], {"timeout": -1.0}),
        ([b"1234", b""], {"timeout": float("nan")}),
    ],
)
def test_84_a_submit_that_makes_no_sense_is_told_apart(frames: list[bytes], changes: dict[str, object]) -> None:
    submit = Submit(RID, 0, 1, "", params())
    for name, value in changes.items():
        setattr(submit, name, value)
    assert Journal().refusal(submit, frames, 128)


def test_a_submit_that_makes_sense_is_taken() -> None:
    assert Journal().refusal(Submit(RID, 0, 256, "", params()), [b"1234" * 256, b"k" * 64], 128) == ""
    assert Journal().refusal(Submit(RID, 0, 1, "", params(), timeout=0.5), [b"1234", b""], 128) == ""
