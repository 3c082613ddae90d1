"""What bench.cpu_engine compares, each in a process of its own: this engine, transformers, llama.cpp.

A child reads one workload a line from stdin and answers with one line: seconds from the submission of all requests
to the last id, and the ids (llama.cpp: the text).
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.local_engine import LocalEngine, greedy
from engine_proc.loader import load
from engine_proc.runner import Runner

PADDED_BATCH = 8  # requests that transformers takes at once
ROOM_TOKENS = 1280  # of one request
CHUNK = 2048  # the server's default

Requests = list[tuple[list[int], int]]  # (prompt's ids, tokens to produce)
Answer = tuple[float, list[Any]]


def engine(folder: Path, dtype: str, threads: int) -> Callable[[Requests], Answer]:
    """This engine in process, all requests submitted at once."""
    torch.set_num_threads(threads)
    loaded = load(folder, "cpu", dtype, "safetensors", lambda done, total: None)
    runner = Runner(loaded, 32 * ROOM_TOKENS // loaded.model.cache_spec.block_tokens, 32)

    def run(requests: Requests) -> Answer:
        local = LocalEngine(loaded, runner, CHUNK, 32, 0)
        local.eos_ids = []
        began = time.perf_counter()
        sids = [local.add(ids, greedy(count)) for ids, count in requests]
        local.run()
        return time.perf_counter() - began, [local.given[sid].ids for sid in sids]

    return run


def transformers(folder: Path, dtype: str, threads: int) -> Callable[[Requests], Answer]:
    """`generate` on batches padded at the left, of requests sorted by their prompt's length."""
    torch.set_num_threads(threads)
    library = importlib.import_module("transformers")
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval()
    model.generation_config.eos_token_id = None

    def batch(requests: Requests) -> list[list[int]]:
        width = max(len(ids) for ids, _ in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(requests):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        count = max(count for _, count in requests)
        out = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=0, use_cache=True
        )
        return [row[width : width + count].tolist() for row, (_, count) in zip(out, requests, strict=True)]

    def run(requests: Requests) -> Answer:
        order = sorted(range(len(requests)), key=lambda index: len(requests[index][0]))
        found: list[Any] = [[]] * len(requests)
        began = time.perf_counter()
        with torch.inference_mode():
            for first in range(0, len(order), PADDED_BATCH):
                part = order[first : first + PADDED_BATCH]
                for index, ids in zip(part, batch([requests[index] for index in part]), strict=True):
                    found[index] = ids
        return time.perf_counter() - began, found

    return run


def llama_cpp(file: Path, slots: int, threads: int) -> Callable[[Requests], Answer]:
    """llama.cpp's server in process (xllamacpp), `slots` requests at once, the others queue."""
    library = importlib.import_module("xllamacpp")
    params = library.CommonParams()
    params.model.path = str(file)
    params.n_parallel, params.n_ctx = slots, slots * ROOM_TOKENS
    params.n_batch = CHUNK
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.fit_params, params.cache_prompt, params.cache_ram_mib = False, False, 0
    params.verbosity = 0
    server = library.Server(params)
    print(library.get_system_info(), file=sys.stderr)

    def run(requests: Requests) -> Answer:
        found: list[Any] = [""] * len(requests)

        def ask(index: int, ids: list[int], count: int) -> None:
            body = {"prompt": ids, "n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
            answer = server.handle_completions(body)
            answer = json.loads(answer) if isinstance(answer, bytes | str) else answer
            if answer.get("usage", {}).get("completion_tokens") != count:
                raise RuntimeError(f"llama.cpp answered {str(answer)[:300]}")
            found[index] = answer["choices"][0]["text"]

        asking = [threading.Thread(target=ask, args=(index, ids, count)) for index, (ids, count) in enumerate(requests)]
        began = time.perf_counter()
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        seconds = time.perf_counter() - began
        if "" in found:
            raise RuntimeError("llama.cpp failed, see above")
        return seconds, found

    return run


def write_f32(source: Path, target: Path) -> None:
    """The F32 GGUF file of the weights in a quantised one, which is what the engine's folder holds."""
    gguf = importlib.import_module("gguf")
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    made_by_writer = ("general.architecture", "general.file_type", "general.quantization_version")
    for key, value in reader.fields.items():
        if not key.startswith("GGUF.") and key not in made_by_writer:
            array = value.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(key, value.contents(), value.types[0], sub_type=value.types[-1] if array else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        plain = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(plain.astype(np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """argv: name, folder or file, dtype or slots, threads."""
    name, place, kind, threads = sys.argv[1:]
    if name == "llama.cpp":
        run = llama_cpp(Path(place), int(kind), int(threads))
    else:
        run = {"engine": engine, "transformers": transformers}[name](Path(place), kind, int(threads))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
