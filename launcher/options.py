"""Every option of the launcher with its text: `--help` prints this as the reference manual."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from engine_proc.config import EngineConfig
from frontend.config import FrontendConfig
from launcher.values import filled, name, number, size, whole
from router_proc.config import RouterConfig
from tokenizer_proc.config import TokenizerConfig
from wire.limits import Limits
from wire.messages import CHOICE_MASK

MAX_PROCESSES = 256
MANY = (1 << 31) - 1
DAY = 86_400.0
DESCRIPTION = """\
Starts an OpenAI-compatible server for one model: HTTP frontends, tokenizers, a router and one engine for each rank.
Without options it serves a small chat model on the CPU at http://127.0.0.1:8888/v1. Prints when it is ready.
SIGTERM or Ctrl-C drains and ends it with code 0; a second one ends it within 3 s.
Environment: DEEPINFER_ACCELERATOR (nvidia | cpu) is --device, DEEPINFER_HF_MODEL_DIR is --model; options win.
"""


class Defaults:
    """What a process's configuration has when nothing is given, as attributes."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        self._values = {field.name: field.default for field in msgspec.structs.fields(kind)}

    def __getattr__(self, field: str) -> Any:
        return self._values[field]


ENGINE, FRONTEND = Defaults(EngineConfig), Defaults(FrontendConfig)
ROUTER, TOKENIZER = Defaults(RouterConfig), Defaults(TokenizerConfig)


class Help(argparse.HelpFormatter):
    """Adds each default to its line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=120)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        value = action.default
        if value in (None, argparse.SUPPRESS, "") or isinstance(value, (bool, list, tuple)) or "(default: " in text:
            return text
        return f"{text} (default: {f'{value:g}' if isinstance(value, float) else value})"


class Parser(argparse.ArgumentParser):
    """Says in one line which option is wrong and what is accepted, and ends with code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def refuse_unknown(self, words: list[str]) -> None:
        if not words:
            return
        known = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(words[0].partition("=")[0], known, 3)
        hint = f"; near it are {', '.join(near)}" if near else ""
        self.error(f"unknown option {words[0]!r}{hint}; --help lists the accepted options")


def make_parser() -> Parser:
    """All options in their groups."""
    parser = Parser(
        prog="launch.py",
        usage="%(prog)s [options]",
        description=DESCRIPTION,
        formatter_class=Help,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help="print this text and end")
    for add in (_model, _http, _processes, _engine, _cache, _router, _limits, _life, _tests):
        add(parser)
    return parser


def _model(parser: Parser) -> None:
    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        metavar="NAME|DIR|FILE",
        type=filled,
        help="an embedded model (smollm2-135m-instruct, gemma-3-270m), "
        "a Hugging Face folder (config.json, tokenizer.json, *.safetensors), or a .gguf file "
        "(default: smollm2-135m-instruct)",
    )
    add(
        "--served-model-name",
        metavar="NAME",
        nargs="+",
        type=name,
        default=(),
        help="names that clients may give "
        "as `model`, the first one is shown first (default: the model's or folder's own name)",
    )
    add(
        "--cache-dir",
        metavar="DIR",
        type=Path,
        help="where downloaded and converted models are kept (default: deepinfer/models in XDG_CACHE_HOME or ~/.cache)",
    )
    add(
        "--engine",
        choices=("torch", "mock"),
        default="torch",
        help="torch computes the model; mock produces "
        "scripted ids without weights, for tests and benches of everything else",
    )
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="",
        help="where engines compute; cuda: rank i on GPU i (default: cpu)",
    )
    add(
        "--dtype",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="of weights and cache; auto: bf16 on cuda, fp32 on cpu",
    )
    add(
        "--load-format",
        choices=("safetensors", "random"),
        default=ENGINE.load_format,
        help="random makes weights on the device instead of reading them, for benches",
    )
    add(
        "--context-length",
        metavar="TOKENS",
        type=whole(0, MANY),
        default=0,
        help="longest prompt + output; "
        "more than the block pool holds is refused (default: 0 = the model's, or what the pool holds)",
    )
    add(
        "--default-max-tokens",
        metavar="TOKENS",
        type=whole(0, MANY),
        default=0,
        help="output limit of requests that give none (default: 0 = to the end of the context)",
    )
    add(
        "--sampling-defaults",
        choices=("model", "openai"),
        default=TOKENIZER.sampling_defaults,
        help="of requests that give no "
        "temperature, top_p ...: the model's generation_config.json, or OpenAI's (temperature and top_p 1)",
    )
    add("--chat-template", metavar="FILE", type=filled, help="a Jinja template instead of the model's own")
    add(
        "--template-kwargs",
        metavar="NAME",
        nargs="*",
        type=name,
        default=Limits().template_kwargs,
        help="keys that clients may give in chat_template_kwargs (default: enable_thinking reasoning_effort)",
    )


def _http(parser: Parser) -> None:
    add = parser.add_argument_group("HTTP").add_argument
    add(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="where to listen; anything but loopback is reachable by others: set keys",
    )
    add("--port", type=whole(0, 65535), default=8888, help="0 = any free one, which is printed")
    add("--port-file", metavar="FILE", type=Path, help="write the port there when the service is ready")
    add(
        "--api-key",
        metavar="KEY",
        action="append",
        default=[],
        help="a key that clients must give "
        "(Authorization: Bearer KEY); may be repeated; visible to users of this machine, so prefer --api-key-file",
    )
    add("--api-key-file", metavar="FILE", type=Path, help="lines `tenant:key`; tenants do not share cached prefixes")
    add(
        "--header-timeout-seconds",
        metavar="S",
        type=number(0.1, DAY),
        default=FRONTEND.header_timeout_seconds,
        help="a request's headers must be complete in this time",
    )
    add(
        "--body-timeout-seconds",
        metavar="S",
        type=number(0.1, DAY),
        default=FRONTEND.body_timeout_seconds,
        help="a request's body must be complete in this time, else 408",
    )
    add(
        "--keepalive-seconds",
        metavar="S",
        type=number(1, DAY),
        default=FRONTEND.keepalive_seconds,
        help="an idle connection is kept this long",
    )
    add(
        "--send-stall-seconds",
        metavar="S",
        type=number(0.1, DAY),
        default=FRONTEND.send_stall_seconds,
        help="a client that reads nothing for this long is cut off",
    )
    add(
        "--comment-seconds",
        metavar="S",
        type=number(0.05, DAY),
        default=FRONTEND.comment_seconds,
        help="a stream without news gets a comment line this often",
    )


def _processes(parser: Parser) -> None:
    add = parser.add_argument_group("processes").add_argument
    add("--dp", metavar="N", type=whole(1, MAX_PROCESSES), default=1, help="ranks: engine processes, one per device")
    add("--tokenizers", metavar="N", type=whole(1, MAX_PROCESSES), default=1, help="tokenizer processes")
    add("--frontends", metavar="N", type=whole(1, MAX_PROCESSES), default=1, help="HTTP processes on the one port")


def _engine(parser: Parser) -> None:
    add = parser.add_argument_group("engine, each rank").add_argument
    add(
        "--max-running",
        metavar="N",
        type=whole(1, 65536),
        default=ENGINE.max_running,
        help="sequences computed together; later ones wait",
    )
    add(
        "--max-bypass",
        metavar="N",
        type=whole(0, MANY),
        default=ENGINE.max_bypass,
        help="how many smaller sequences may start before one that waits for blocks",
    )
    add(
        "--prefill-chunk-tokens",
        metavar="TOKENS",
        type=whole(16, MANY),
        default=ENGINE.prefill_chunk_tokens,
        help="most tokens in one step; longer prompts are computed in chunks",
    )
    add(
        "--device-blocks",
        metavar="N",
        type=whole(0, MANY),
        default=0,
        help="blocks in the device pool (default: 0 = what fits in memory)",
    )
    add(
        "--block-tokens",
        type=int,
        choices=(16, 128),
        default=ENGINE.block_tokens,
        help="positions in a block; 16 is for tiny test models",
    )
    add(
        "--gpu-memory-fraction",
        metavar="F",
        type=number(0.05, 1.0),
        default=None,
        help="of a GPU's memory that the engine may take, weights among it "
        f"(default: {ENGINE.gpu_memory_fraction}; needs --device cuda)",
    )
    add(
        "--attention-backend",
        choices=("auto", "sdpa", "paged"),
        default=ENGINE.attention_backend,
        help="paged reads blocks in place with Triton kernels, on cuda only; sdpa is PyTorch's own attention; "
        "auto: paged on cuda, sdpa on cpu",
    )
    add(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        default=ENGINE.cuda_graphs,
        help="on cuda: capture short steps as graphs at the start (default: on)",
    )
    add(
        "--step-limit-seconds",
        metavar="S",
        type=number(0.1, DAY),
        default=ENGINE.step_limit_seconds,
        help="an engine whose step takes longer ends itself and is started again",
    )


def _cache(parser: Parser) -> None:
    add = parser.add_argument_group("prefix cache").add_argument
    add(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep computed prompts in device memory and use them for prompts that begin alike (default: on)",
    )
    add(
        "--share-prefix-cache",
        action="store_true",
        help="share cached prefixes between tenants; then the time to the "
        "first token tells one tenant what another one has sent (default: off)",
    )
    add(
        "--cluster-secret-file",
        metavar="FILE",
        type=Path,
        help="at least 16 bytes; servers with the same secret "
        "name cached blocks alike (default: a random secret at each start)",
    )
    add(
        "--segment-cache-tokens",
        metavar="TOKENS",
        type=whole(0, MANY),
        default=TOKENIZER.segment_cache_tokens,
        help="encoded text kept by each tokenizer; 0 = none",
    )


def _router(parser: Parser) -> None:
    add = parser.add_argument_group("router").add_argument
    add(
        "--routing",
        choices=("affinity", "least-loaded"),
        default=ROUTER.routing,
        help="affinity sends a conversation to the rank that has its prefix",
    )
    add(
        "--affinity-slack-tokens",
        metavar="TOKENS",
        type=whole(0, MANY),
        default=ROUTER.affinity_slack_tokens,
        help="load by which that rank may exceed another one before it is left",
    )
    add(
        "--max-queued-requests",
        metavar="N",
        type=whole(0, MANY),
        default=ROUTER.max_queued_requests,
        help="sequences that may wait, over all ranks; above that 429",
    )
    add(
        "--max-queued-tokens",
        metavar="TOKENS",
        type=whole(0, MANY),
        default=ROUTER.max_queued_tokens,
        help="prompt tokens that may wait, over all ranks (default: 0 = no limit)",
    )
    add(
        "--engine-silence-seconds",
        metavar="S",
        type=number(0.1, DAY),
        default=ROUTER.engine_silence_seconds,
        help="a rank not heard of for this long gets no requests, and its live ones end",
    )


def _limits(parser: Parser) -> None:
    add = parser.add_argument_group("limits on a request", "above them: 400 naming the field (body: 413)").add_argument
    limits = Limits()
    for field, high, text in (
        ("max_n", CHOICE_MASK + 1, "choices (n)"),
        ("max_messages", 1 << 20, "messages"),
        ("max_tools", 1 << 20, "tools"),
        ("max_stop", 1024, "stop strings"),
        ("max_stop_chars", 65536, "characters of a stop string"),
        ("max_stop_token_ids", 65536, "stop_token_ids"),
        ("max_logit_bias", 65536, "entries of logit_bias"),
        ("max_top_logprobs", 1024, "top_logprobs of a chat"),
        ("max_completion_logprobs", 1024, "logprobs of a completion"),
        ("max_json_depth", 512, "depth of the JSON body"),
    ):
        add(f"--{field.replace('_', '-')}", metavar="N", type=whole(1, high), default=getattr(limits, field), help=text)
    add(
        "--max-body-bytes",
        metavar="BYTES",
        type=size(1024, 1 << 31),
        default=limits.max_body_bytes,
        help="of a request's body, counted as it arrives",
    )
    add(
        "--inline-body-bytes",
        metavar="BYTES",
        type=size(0, 1 << 31),
        default=limits.inline_body_bytes,
        help="larger bodies are parsed by a tokenizer, so that no other stream waits",
    )


def _life(parser: Parser) -> None:
    add = parser.add_argument_group("start, end and log").add_argument
    add(
        "--start-timeout-seconds",
        metavar="S",
        type=number(0.1, DAY),
        default=600.0,
        help="a process that is not ready in this time has failed",
    )
    add(
        "--drain-seconds",
        metavar="S",
        type=number(0, DAY),
        default=30.0,
        help="how long streams may go on after SIGTERM",
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="of all processes; no level shows prompts, outputs or keys",
    )


def _tests(parser: Parser) -> None:
    add = parser.add_argument_group("tests", "never for a service that others use").add_argument
    add(
        "--test-hooks",
        action="store_true",
        help="let requests script the mock engine and inject faults; only on a loopback --host",
    )
    add(
        "--key-bits",
        metavar="BITS",
        type=whole(1, 256),
        default=256,
        help="of block keys; fewer make collisions; needs --test-hooks",
    )
    add(
        "--mock-step-ms",
        metavar="MS",
        type=number(0, 60_000),
        default=0.0,
        help="duration of a step; needs --engine mock",
    )
    add(
        "--mock-model",
        choices=("counter", "echo"),
        default="counter",
        help="what the mock engine produces: ids that follow from the prompt, or the prompt's own; needs --engine mock",
    )
