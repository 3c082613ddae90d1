"""Keeps the text of control tokens in clients' strings from becoming control tokens (behaviour 31).

Before a template runs, each place in a client's string where the text of a control token begins is broken by a mark: a
character that occurs in none of the strings. The encoder looks for control tokens in the rendered text, where a broken
one cannot match, and takes the marks out of the text between them. Because marks stand only inside such texts,
templates that trim, split or test content see what they expect.

A token could also be put together at a border: a string ending in `<|im_` before a template's `end|>`. So a string
that ends in the beginning of a token gets a mark there. The other way round needs a template whose literal ends in the
beginning of a token (`'<|' + message.name + '|>'`): only for such templates (`open_ended`), message strings that go on
or end like a token are marked in front.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Any

import jinja2
from jinja2 import ext, nodes
from jinja2.parser import Parser

MARKS = [chr(code) for code in chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE))]  # noncharacters, private use
GATE_CHARS = 2
ROLES = frozenset(("system", "user", "assistant", "tool"))


class Guard:
    """For one set of control token texts and the chat templates that may be used with them."""

    def __init__(self, control: Iterable[str], templates: Iterable[str] = ()) -> None:
        self._control = sorted(set(control), key=len, reverse=True)
        self._gates = sorted({text[:GATE_CHARS] for text in self._control})
        self._firsts = sorted({text[0] for text in self._control})
        self._longest = max(map(len, self._control), default=0)
        self._prefixes = {text[:size] for text in self._control for size in range(1, len(text))}
        self._suffixes = {text[start:] for text in self._control for start in range(1, len(text))}
        self._starts = re.compile(f"(?={any_of(self._control)})(.)", re.DOTALL) if self._control else None
        self.open_ended = any(self._ends_in_prefix(text) for source in templates for text in literals(source))

    def protect(self, messages: Any, tools: Any = None) -> tuple[Any, Any, str]:
        """(messages, tools, mark): copies with marks, or the very same objects and "" when nothing needs one."""
        if not self._control:
            return messages, tools, ""
        found = [*_strings(messages), *_strings(tools)]
        fronts = self.open_ended
        if not any(self._touches(text, fronts) for text in found):
            return messages, tools, ""
        mark = next(mark for mark in MARKS if not any(mark in text for text in found))
        return self._marked(messages, mark, fronts), self._marked(tools, mark, False), mark

    def protect_text(self, text: str) -> tuple[str, str]:
        """(text, mark) for a bare prompt."""
        if not self._control or not self._touches(text, False):
            return text, ""
        mark = next(mark for mark in MARKS if mark not in text)
        return self._mark_text(text, mark, False), mark

    def _touches(self, text: str, fronts: bool) -> bool:
        # Almost all strings pass with these few fast searches.
        if any(gate in text for gate in self._gates) and self._starts is not None and self._starts.search(text):
            return True
        return self._ends_in_prefix(text) or (fronts and self._goes_on(text))

    def _ends_in_prefix(self, text: str) -> bool:
        tail = text[-self._longest :]
        if not any(first in tail for first in self._firsts):
            return False
        return any(tail[-size:] in self._prefixes for size in range(1, min(len(tail), self._longest - 1) + 1))

    def _goes_on(self, text: str) -> bool:
        """Whether the text begins with the end of a token, or is a part of one."""
        head = text[: self._longest]
        if any(head[:size] in self._suffixes for size in range(1, len(head) + 1)):
            return True
        return 0 < len(text) < self._longest and any(text in token[1:] for token in self._control)

    def _mark_text(self, text: str, mark: str, fronts: bool) -> str:
        marked = text
        if self._starts is not None and any(gate in text for gate in self._gates):
            # Not one call of `sub`: between matches other threads can run.
            ends = [found.end() for found in self._starts.finditer(text)]
            marked = mark.join([text[start:end] for start, end in pairwise([0, *ends, len(text)])])
        if self._ends_in_prefix(text):
            marked += mark
        return mark + marked if fronts and self._goes_on(text) else marked

    def _marked(self, value: Any, mark: str, fronts: bool) -> Any:
        if type(value) is str:
            return self._mark_text(value, mark, fronts)
        if type(value) is list:
            return [self._marked(item, mark, fronts) for item in value]
        if type(value) is dict:
            return {
                self._mark_text(name, mark, False): (
                    item if name == "role" and type(item) is str and item in ROLES else self._marked(item, mark, fronts)
                )
                for name, item in value.items()
            }
        return value


def any_of(texts: Iterable[str], after_single: str = "") -> str:
    """A regular expression for the longest of these texts, as a tree: models have thousands of control tokens.

    `after_single` follows texts of one character.
    """
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}

    def pattern(node: dict[str, Any], depth: int) -> str:
        ends = "" in node
        branches = [
            re.escape(character) + (pattern(child, depth + 1) if child.keys() != {""} else after_single * (depth == 0))
            for character, child in sorted(node.items())
            if character
        ]
        if not branches:
            return ""
        joined = branches[0] if len(branches) == 1 and not ends else f"(?:{'|'.join(branches)})"
        return f"{joined}?" if ends else joined

    return pattern(root, 0)


def literals(source: str) -> Iterator[str]:
    """All constant texts of a template: what stands between tags, and string constants in expressions."""
    tree = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag], autoescape=False
    ).parse(source)  # only parsed here, never rendered
    for data in tree.find_all(nodes.TemplateData):
        yield data.data
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value


class GenerationTag(ext.Extension):
    """`{% generation %}` marks what a model wrote, for training; here its body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _strings(value: Any) -> Iterator[str]:
    stack = [value]
    while stack:
        item = stack.pop()
        if type(item) is str:
            yield item
        elif type(item) is list:
            stack += item
        elif type(item) is dict:
            stack += item.values()
            stack += item.keys()
