"""The ``labkit`` command."""

from __future__ import annotations

import argparse
import os
import sys

from labkit.errors import LabError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="labkit", description="The course's helper: look at the machine, fetch the model, record, grade."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="say what this machine can run, and what to do about the rest")
    doctor.add_argument("--full", action="store_true", help="also verify the model's checksum")
    model = commands.add_parser("model", help="fetch and verify a model, and convert it for fast loading")
    model.add_argument("name", nargs="?", default="smollm2-135m")
    quantise = commands.add_parser("quantise", help="quantise a model and write it as an AWQ checkpoint")
    quantise.add_argument("name", metavar="MODEL", help="a built-in name, a GGUF file or a Hugging Face folder")
    quantise.add_argument("folder", metavar="FOLDER", help="where to write; it must not be there yet")
    quantise.add_argument("--bits", type=int, default=4, help="of a weight (4, the only ones the layout holds)")
    quantise.add_argument("--group", type=int, default=64, help="weights that share a scale (64); -1: a whole row")
    quantise.add_argument("--method", default="awq", help="awq, gptq or rtn (awq)")
    quantise.add_argument("--calibration", metavar="FILE.jsonl", help='{"text": "…"} a line (the project\'s prose)')
    bench = commands.add_parser("bench", help="measure every operator, or the engine, beside its ceiling and its peers")
    bench.add_argument("what", choices=["kernels", "engine", "serve"], help="what to measure")
    bench.add_argument("--record", help="also write the measurements into this recording")
    bench.add_argument("operators", nargs="*", help="kernels: only these operators (all, if none is given)")
    bench.add_argument("--model", default="llama-3-8b", help="engine: a shape, with random weights (llama-3-8b)")
    bench.add_argument("--batches", type=int, nargs="+", help="engine: only these batch sizes")
    bench.add_argument("--no-eager", action="store_true", help="engine: only with CUDA graphs")
    bench.add_argument("--no-peer", action="store_true", help="engine: without transformers beside it")
    bench.add_argument("--profile", action="store_true", help="engine: where the time of a decode step goes")
    bench.add_argument("--requests", type=int, default=1000, help="serve: how many requests (1000)")
    bench.add_argument("--rate", type=float, default=40.0, help="serve: arrivals a second (40)")
    bench.add_argument("--trace", help="serve: a file for the scheduler's trace (.json or .json.gz)")
    record = commands.add_parser("record", help="take the labs' measurements on this GPU and write its recording")
    record.add_argument("labs", nargs="*", help="numbers of the labs, such as 00 01 (all, if none is given)")
    record.add_argument("--out", help="recording to write (labkit/recordings/GPU.json, if not given)")
    check = commands.add_parser("check", help="grade the exercises that a notebook file holds")
    check.add_argument("notebook", help="path of an .ipynb file")
    args = parser.parse_args(argv)
    try:
        code = _RUN[args.command](args)
        sys.stdout.flush()  # a reader that has gone is noticed here, and not at exit
        return code
    except LabError as error:
        print(f"labkit {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; nothing half-written was left behind", file=sys.stderr)
        return 130
    except BrokenPipeError:  # such as `| head`: what is still in the buffer goes nowhere, or exit would raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _doctor(args) -> int:
    from labkit.course.doctor import print_doctor

    return print_doctor(full=args.full)


def _model(args) -> int:
    from labkit.engine.fetch import fetch_model, verify_model
    from labkit.engine.gguf import converted_folder

    path = fetch_model(args.name)
    verify_model(args.name)
    print(f"model: {path} (verified)")
    print(f"weights: {converted_folder(path)}")
    return 0


def _quantise(args) -> int:
    from labkit.engine.quantise import quantise_folder
    from labkit.quant import Format

    fmt = Format(args.bits, args.group)
    folder = quantise_folder(args.name, args.folder, fmt, args.method, args.calibration)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"wrote {folder}: {fmt}, by {args.method}, {size / 1e6:.0f} MB")
    if fmt.group == -1 or fmt.group % 32 == 0:
        print(f'run it with LLM("{folder}", quantization="awq"), on a GPU with dtype="bfloat16" or "float16"')
    else:
        print(
            f'run it with LLM("{folder}"), which dequantises it: packed weights (quantization="awq") need groups of a '
            f"multiple of 32 or a whole row, and these are of {fmt.group}"
        )
    return 0


def _bench(args) -> int:
    if args.record:
        os.environ["LABKIT_RECORD"] = args.record
    if args.what == "engine":
        return _bench_engine(args)
    if args.what == "serve":
        from labkit.bench.serve import bench_serve

        if args.operators:
            raise LabError(f"bench serve takes no operators, got {', '.join(args.operators)}")
        return bench_serve(args.model, args.requests, args.rate, args.trace)
    from labkit.measure.bench import bench
    from labkit.measure.bench_kernels import rows

    known = {row.operator for row in rows()}
    if unknown := set(args.operators) - known:
        raise LabError(
            f"There is no operator {', '.join(sorted(unknown))} to measure; there are {', '.join(sorted(known))}."
        )
    return bench([row for row in rows() if not args.operators or row.operator in args.operators])


def _bench_engine(args) -> int:
    from labkit.bench.engine import BATCHES, bench_engine, profile_engine

    if args.operators:
        raise LabError(f"bench engine takes no operators, got {', '.join(args.operators)}; --batches chooses the sizes")
    if unknown := sorted(set(args.batches or ()) - set(BATCHES)):
        raise LabError(f"there is no batch of {unknown[0]} among those measured: {', '.join(map(str, BATCHES))}")
    if args.profile:
        return profile_engine(args.model, args.batches or (1, 64))
    return bench_engine(args.model, args.batches or BATCHES, not args.no_eager, not args.no_peer)


def _record(args) -> int:
    from labkit.course.record import record

    return record(args.labs, args.out)


def _check(args) -> int:
    from labkit.course.grade import grade

    return grade(args.notebook)


_RUN = {
    **{"doctor": _doctor, "model": _model, "quantise": _quantise, "bench": _bench},
    **{"record": _record, "check": _check},
}

if __name__ == "__main__":
    sys.exit(main())
