"""What receipts cost, and how fast they are verified: `python -m perf.receipts`.

One engine in this process runs the same requests with and without receipts, in turns, and then verifies those of one
sequence. This prints, as medians of the rounds with the least and the most: the rate with receipts beside the rate
without, and the rate of verifying one output beside that of generating it.

Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import statistics
import time

from perf.random_models import RandomModel, asked_models

from shardline.config.engine import EngineConfig
from shardline.deployment.fingerprint import NumericContract
from shardline.deployment.here import resolve_here
from shardline.engine.engine import Engine
from shardline.engine.executor import make_executor
from shardline.messages.request import Request
from shardline.receipts.check import check_output
from shardline.receipts.receipt import make_receipt
from shardline.sampling_params import SamplingParams

BATCHES = (1, 32)
PROMPT_LEN, OUTPUT_LEN = 128, 128
CONTRACT = NumericContract("measured")


def run(engine: Engine, requests: list[Request]) -> tuple[float, list[tuple[list[int], list[str]]]]:
    """Seconds for all requests together, and the tokens and the digests of each."""
    found: dict[str, tuple[list[int], list[str]]] = {request.request_id: ([], []) for request in requests}
    started = time.perf_counter()
    for request in requests:
        engine.add_request(request)
    while engine.busy:
        for output in engine.step():
            tokens, digests = found[output.request_id]
            tokens += output.token_ids
            digests += output.digests or []
    seconds = time.perf_counter() - started
    return seconds, list(found.values())


def measure(model: RandomModel, temperature: float) -> None:
    """Print a line for each batch, and one for verifying."""
    setup = resolve_here(EngineConfig.from_options(**model.options))
    executor = make_executor(setup)
    executor.start()
    engine = Engine(setup, executor)
    verified: list[float] = []
    for batch in BATCHES:
        ratios: list[float] = []
        for round_ in range(model.rounds + 1):
            sampling = SamplingParams(temperature=temperature, seed=round_, max_tokens=OUTPUT_LEN, ignore_eos=True)
            digested = SamplingParams(
                temperature=temperature, seed=round_, max_tokens=OUTPUT_LEN, ignore_eos=True, logits_digest=True
            )
            prompts = [prompt["prompt_token_ids"] for prompt in model.prompts(batch, PROMPT_LEN)]

            def requests(params: SamplingParams, prompts: list[list[int]] = prompts) -> list[Request]:
                return [
                    Request(request_id=str(index), prompt_token_ids=prompt, sampling=params)
                    for index, prompt in enumerate(prompts)
                ]

            without, plain = run(engine, requests(sampling))
            engine.reset_prefix_cache()
            made = requests(digested)
            started = time.perf_counter()
            _, outputs = run(engine, made)
            receipts = [make_receipt(CONTRACT, one, *got) for one, got in zip(made, outputs, strict=True)]
            seconds = time.perf_counter() - started
            engine.reset_prefix_cache()
            assert [tokens for tokens, _ in plain] == [tokens for tokens, _ in outputs], "a receipt changes an answer"
            if round_:  # the first one warms up
                ratios.append(without / seconds)
            if batch == 1:
                took, [output] = run(engine, [receipts[0].request("v", 0.0)])
                engine.reset_prefix_cache()
                assert check_output(receipts[0], *output).equal
                if round_:
                    verified.append(without / took)
        print(f"{model.name}, {batch} sequences, temperature {temperature}: {_spread(ratios)} x without", flush=True)
    print(f"{model.name}, temperature {temperature}: verifying {_spread(verified)} x generating", flush=True)
    engine.close()
    executor.close()


def _spread(found: list[float]) -> str:
    return f"{statistics.median(found):.2f} [{min(found):.2f}-{max(found):.2f}]"


def main() -> None:
    """Measure every model that the user asked for."""
    for model in asked_models(__doc__, rounds=5):
        for temperature in (0.8, 0.0):
            measure(model, temperature)


if __name__ == "__main__":
    main()
