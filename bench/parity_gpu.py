"""Paths of this library's Trainer that capture nothing, beside transformers.Trainer on one GPU: not slower is the claim.

    .venv/bin/python bench/token_ids.py                              # once, on a machine with ../shared
    python bench/parity_gpu.py [--cases ...] [--precisions bf16 fp32] [--turns 8] [--steps 10] [--output FILE.json]

BERT-base's shape, MRPC's token ids, batches of 8. Cases: `plain` (all speed-ups off), `hooked` (a user's forward hook on the
encoder), or the name of an optimizer for `--optim`. The two Trainers of a case live side by side, each in a thread, and hand
over to the other after each turn of `--steps` steps, so that a slow moment of the host meets both. Printed: the median turn of
each in ms a step, and the median of the ratios of neighbouring turns with their quartiles. `--tiny` is for a look at the
host's share, also on a CPU; `--profile FILE` writes where the host's time of both goes in the first case.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from families_gpu import make_kind
from records import host_seconds, read_commit
from token_files import arrow_rows, collator, engine_rows

CASES = ("plain", "hooked", "adamw_torch", "adafactor", "sgd", "rmsprop", "adagrad")
TINY = {"hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 2, "intermediate_size": 128}
WARM_UP = 2


class Side:
    """One Trainer in a thread of its own; `turn` lets it run some steps and gives the seconds of one."""

    def __init__(self, kind: str, case: str, half: bool, rows: Any, args: argparse.Namespace) -> None:
        self._kind, self._case, self._half, self._rows, self._args = kind, case, half, rows, args
        self._may_run, self._has_run = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self.profile: cProfile.Profile | None = None
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def turn(self) -> float:
        began = time.process_time() if self._args.tiny else time.perf_counter()
        self._may_run.release()
        self._has_run.acquire()
        if self._error is not None:
            raise self._error
        taken = (time.process_time() if self._args.tiny else time.perf_counter()) - began
        return taken / self._args.steps

    def _train(self) -> None:
        self._may_run.acquire()
        try:
            self._run()
        except BaseException as error:  # raised again by `turn`
            self._error = error
        self._has_run.release()

    def _run(self) -> None:
        import transformers

        args, count = self._args, self._args.steps
        torch.manual_seed(0)
        config = transformers.BertConfig(num_labels=2, **(TINY if args.tiny else {}))
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = transformers.BertForSequenceClassification(config)
        if self._case == "hooked":
            model.base_model.register_forward_hook(lambda module, given, found: None)
        side = self

        class HandOver(transformers.TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step % count == 0:
                    side.hand_over()

        optim = {} if self._case in ("plain", "hooked") else {"optim": self._case}
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, max_steps=(args.turns + WARM_UP) * count, per_device_train_batch_size=8, bf16=self._half,
                save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=10**6,
                use_cpu=not torch.cuda.is_available(), **optim,
            )  # fmt: skip
            trainer = make_kind(self._kind)(
                model, arguments, train_dataset=self._rows, data_collator=collator(), callbacks=[HandOver()]
            )
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()

    def hand_over(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self.profile is not None:
            self.profile.disable()
        self._has_run.release()
        self._may_run.acquire()
        if self.profile is not None:
            self.profile.enable()


def compare(case: str, half: bool, rows: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Both Trainers in turns."""
    sides = {"theirs": Side("theirs", case, half, rows, args)}
    for _ in range(WARM_UP):
        sides["theirs"].turn()
    sides["ours"] = Side("plain" if case == "plain" else "ours", case, half, rows, args)
    for _ in range(WARM_UP):
        sides["ours"].turn()
    if args.profile:
        for side in sides.values():
            side.profile = cProfile.Profile()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(args.turns):
        order = sides if number % 2 else dict(reversed(sides.items()))
        for name, side in order.items():
            times[name].append(1e3 * side.turn())
    if args.profile:
        _write_profiles(args.profile, sides, args.steps * args.turns)
        args.profile = None
    ratios = [a / b for a, b in zip(times["theirs"], times["ours"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    found = {name: round(statistics.median(some), 2) for name, some in times.items()}
    return {"case": case, "precision": "bf16" if half else "fp32", "ms": found} | {
        "ratio": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)], "turns": times,
    }  # fmt: skip


def _write_profiles(path: str, sides: dict[str, Side], steps: int) -> None:
    text = io.StringIO()
    for name, side in sides.items():
        text.write(f"\n{name}: {steps} steps\n")
        for key in ("tottime", "cumtime"):
            pstats.Stats(side.profile, stream=text).sort_stats(key).print_stats(45)
    Path(path).write_text(text.getvalue())


def main() -> None:
    """Prints a line for each case and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--precisions", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1e9, help="no further case is begun after so many")
    parser.add_argument("--tiny", action="store_true", help="processor time of 12 layers of 64")
    parser.add_argument("--profile")
    parser.add_argument("--output")
    args = parser.parse_args()
    import transformers

    transformers.utils.logging.set_verbosity_error()
    began, rows = time.perf_counter(), arrow_rows(engine_rows("mrpc", "train"))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = {
        "torch": torch.__version__, "transformers": transformers.__version__, "device": device,
        "date": time.strftime("%Y-%m-%d"), "commit": read_commit(), "host": round(host_seconds(), 3),
        "command": f"bench/parity_gpu.py {' '.join(sys.argv[1:])}",
    }  # fmt: skip
    print(about, flush=True)
    results: list[dict[str, Any]] = []
    for case in args.cases:
        for precision in args.precisions:
            if time.perf_counter() - began > args.seconds:
                print(f"{case} {precision}: left out, {args.seconds:.0f} s are over", flush=True)
                continue
            try:
                results.append(compare(case, precision == "bf16", rows, args))
            except Exception as error:  # the others are measured all the same
                print(f"{case} {precision}: {type(error).__name__}: {error}", flush=True)
                continue
            print({k: v for k, v in results[-1].items() if k != "turns"}, flush=True)
            if args.output:
                Path(args.output).write_text(json.dumps(about | {"results": results}, indent=1))


if __name__ == "__main__":
    main()
