"""The words of the `jaxgpt` command: every verb, its options and their help."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, NoReturn

from jaxgpt import __version__, config
from jaxgpt.bench_options import add_bench_verbs
from jaxgpt.errors import ConfigError
from jaxgpt.option_types import share, whole
from jaxgpt.toml_values import type_name
from jaxgpt.validation import MAX_SEED


class Parser(argparse.ArgumentParser):
    """argparse whose refusals are one line and exit code 64, as for any other configuration."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message} (see {self.prog} --help)")


def fields_help() -> str:
    """Return every configuration field with type, default, unit and meaning, for `--help`."""
    lines = ["configuration fields, given as section.field=value or in a TOML file:"]
    for section in config.SECTIONS:
        lines.append(f"\n[{section}]")
        defaults = config.SECTIONS[section]()
        for field, hint in config.fields_of(section):
            default = json.dumps(getattr(defaults, field.name))
            unit = f" {field.metadata['unit']}" if field.metadata["unit"] else ""
            lines.append(f"  {section}.{field.name} = {default}{unit}  ({type_name(hint)})")
            lines.append(f"      {field.metadata['meaning']}")
    return "\n".join(lines)


def build_parser() -> Parser:
    """Return the parser of all verbs; `verb` and its options end up in the namespace."""
    parser = Parser(prog="jaxgpt", description="Raw text in, a trained GPT out.")
    parser.add_argument("--version", action="version", version=f"jaxgpt {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(parent: Any, name: str, summary: str, *, configured: bool = False) -> Parser:
        sub = parent.add_parser(
            name,
            help=summary,
            description=summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        if configured:
            sub.add_argument("config", nargs="*", metavar="CONFIG.toml | section.field=value")
            sub.epilog = fields_help()
        return sub

    tokenizer = verbs.add_parser("tokenizer", help="train, inspect or use a subword tokenizer")
    actions = tokenizer.add_subparsers(dest="action", metavar="ACTION", required=True)
    verb(actions, "train", "train a SentencePiece model on data.sources", configured=True)
    sub = verb(actions, "import", "write another program's tokenizer as one self-contained file")
    sub.add_argument("path", help="SentencePiece model, tokenizer.json or tiktoken rank file")
    sub.add_argument("out", help="file to write, e.g. STORE/tokenizer.model")
    sub.add_argument("--eos", metavar="NAME", help="symbol that ends a text; default: as in PATH")
    sub.add_argument("--pattern", metavar="REGEX",
                     help="what a tiktoken rank file cuts texts into")  # fmt: skip
    for name, summary in (
        ("info", "print vocabulary size, special ids and digest"),
        ("encode", "print the ids of a text"),
        ("decode", "print the text of ids"),
    ):
        sub = verb(actions, name, summary)
        sub.add_argument("model", help="tokenizer model file, token store or run folder")
        if name != "info":
            sub.add_argument("input", nargs="*", help="text, or ids; without it, standard input")

    sub = verb(verbs, "prepare", "make the token store data.store of data.sources", configured=True)
    sub.add_argument("--workers", type=whole(0), default=0, help="processes; 0: one per core")
    sub.add_argument("--partitions", type=share, metavar="I/N",
                     help="do this share of the work; `data merge` joins the shares")  # fmt: skip
    sub.add_argument("--runner", choices=("local", "beam"), default="local",
                     help="processes of this machine, or an Apache Beam pipeline")  # fmt: skip
    sub.add_argument("--beam-option", action="append", default=[], metavar="X",
                     help="as --beam-option=--runner=FlinkRunner, or all after --")  # fmt: skip
    sub.set_defaults(after_dashes=())

    add_data_verbs(verb, verbs.add_parser("data", help="check, count, merge and look into stores"))

    sub = verb(verbs, "train", "train a model; a run that exists is continued", configured=True)
    sub.add_argument(
        "--show-config", action="store_true", help="print every value and its origin, and stop"
    )
    sub.add_argument("--dry-run", action="store_true",
                     help="start the hosts, print them and the mesh, and stop")  # fmt: skip
    add_host_options(sub)

    sub = verb(verbs, "eval", "loss, perplexity and bits per byte of a checkpoint")
    sub.add_argument("run", help="run folder, or one step folder in its ckpt/")
    sub.add_argument("--data", action="append", default=[], metavar="[NAME=]PATH",
                     help="token store or text; default: the run's held-out data")  # fmt: skip
    sub.add_argument("--step", type=int, help="checkpoint step; default: the newest")
    sub.add_argument("--batch", type=whole(0), default=0,
                     help="rows at once; never changes the result; 0: as in training")  # fmt: skip
    sub.add_argument("--max-rows", type=whole(0), default=0, help="rows per set; 0: all")
    add_host_options(sub)
    add_weight_options(sub)

    sub = verb(verbs, "generate", "write text with a checkpoint")
    sub.add_argument("run", help="run folder, or one step folder in its ckpt/")
    sub.add_argument("--prompt", action="append", default=[], help="start of a text; repeatable")
    sub.add_argument("--prompt-file", help="a file with one prompt a line")
    sub.add_argument("--step", type=int, help="checkpoint step; default: the newest")
    sub.add_argument("--max-new-tokens", type=int, default=128)
    sub.add_argument("--temperature", type=float, default=0.8, help="0: greedy")
    sub.add_argument("--top-k", type=int, default=0, help="0: off")
    sub.add_argument("--top-p", type=float, default=1.0, help="nucleus; 1: off")
    sub.add_argument("--min-p", type=float, default=0.0, help="share of the best token; 0: off")
    sub.add_argument("--repetition-penalty", type=float, default=1.0, help="1: off")
    sub.add_argument("--seed", type=whole(0, MAX_SEED), default=0)
    sub.add_argument("--samples", type=whole(1), default=1, help="continuations of each prompt")
    sub.add_argument("--window", action="store_true",
                     help="past the context, go on with the most recent tokens")  # fmt: skip
    sub.add_argument("--ignore-eos", action="store_true", help="do not stop at end-of-text")
    add_weight_options(sub)

    add_plan_verb(verb, verbs)

    sub = verb(verbs, "doctor", "check this machine, or what meshes compute", configured=True)
    sub.add_argument("--mesh", action="store_true",
                     help="compare every mesh of simulated devices with one device")  # fmt: skip
    sub.add_argument("--devices", type=int, choices=(2, 4, 8), default=8,
                     help="with --mesh: how many are simulated")  # fmt: skip

    add_bench_verbs(verb, verbs.add_parser("bench", help="measure how fast the parts are here"))
    add_hf_verbs(verb, verbs.add_parser("hf", help="Hugging Face models in and out"))
    return parser


def add_plan_verb(verb: Callable[..., Parser], verbs: Any) -> None:
    """Add `jaxgpt plan` to the verbs."""
    what = "what a run needs on a machine that need not be here; exit code 64 if it does not fit"
    sub = verb(verbs, "plan", what, configured=True)
    sub.add_argument("--on", required=True, metavar="TARGET",
                     help="machine: v5p-128, 2*v6e-256, v5p-4x4x8, h100x64, h200x1")  # fmt: skip
    sub.add_argument("--analytic", action="store_true", help="do not compile, only count")
    sub.add_argument("--search", action="store_true",
                     help="find the fastest mesh, remat and micro-batch that fit")  # fmt: skip
    sub.add_argument("--write", metavar="FILE", help="write what --search found as a preset")


def add_hf_verbs(verb: Callable[..., Parser], parser: Parser) -> None:
    """Add what `jaxgpt hf` can do to its parser."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    sub = verb(actions, "import", "make a run of a Hugging Face folder, to evaluate or start from")
    sub.add_argument("directory", metavar="DIR",
                     help="folder with config.json, *.safetensors, tokenizer files")  # fmt: skip
    sub.add_argument("run", metavar="RUN", help="run folder to make")
    sub.add_argument("--dtype", choices=("float32", "bfloat16", "stored"), default="stored",
                     help="of the weights in the run; default: as they are stored")  # fmt: skip

    sub = verb(actions, "export", "write a checkpoint as a folder that transformers loads")
    sub.add_argument("run", metavar="RUN", help="run folder, or one step folder in its ckpt/")
    sub.add_argument("directory", metavar="DIR", help="folder to make")
    sub.add_argument("--step", type=whole(0), help="checkpoint step; default: the newest")
    sub.add_argument("--dtype", choices=("float32", "bfloat16", "stored"), default="stored",
                     help="of the tensors; default: as in the checkpoint")  # fmt: skip
    sub.add_argument("--weights", choices=("ema", "last"),
                     help="their moving average, or those after the last update; default: the "
                     "average where the checkpoint holds one")  # fmt: skip
    sub.add_argument("--verify", choices=("full", "twin", "none"), default="full",
                     help="what transformers must agree on: the model, a tiny one of the same "
                     "configuration, or nothing")  # fmt: skip
    sub.add_argument("--shard-bytes", type=whole(1), default=5 << 30, metavar="N",
                     help="about the size of a file of weights; default: 5 GiB")  # fmt: skip


def add_host_options(sub: Parser) -> None:
    """Add what says which process of a run on many hosts this is."""
    sub.add_argument("--coordinator", metavar="HOST:PORT",
                     help="where process 0 runs, and a free port there; default: as the launcher "
                     "says (TPU, Slurm, Kubernetes, Open MPI)")  # fmt: skip
    sub.add_argument("--process", type=whole(0), metavar="I", help="number of this process, from 0")
    sub.add_argument("--processes", type=whole(1), metavar="N",
                     help="processes of the run; 1: alone, whatever launchers say")  # fmt: skip


def add_weight_options(sub: Parser) -> None:
    """Add which weights of a checkpoint are used, and how they are computed with."""
    sub.add_argument("--weights", choices=("ema", "last"),
                     help="their moving average, or those after the last update; default: the "
                     "average where the checkpoint holds one")  # fmt: skip
    sub.add_argument("--dtype", choices=("float32", "bfloat16"),
                     help="of matmul inputs; default: train.compute_dtype of the run")  # fmt: skip


def add_data_verbs(verb: Callable[..., Parser], parser: Parser) -> None:
    """Add what `jaxgpt data` can do to its parser."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    what = "CONFIG.toml or a run folder, and section.field=value"

    sub = verb(actions, "stats", "what a store holds, and how a run will use its stores")
    sub.add_argument("config", nargs="+", metavar="STORE | CONFIG", help=f"token stores; or {what}")

    sub = verb(actions, "show", "the rows of a step: their text, documents, files and offsets")
    sub.add_argument("config", nargs="+", metavar="CONFIG", help=what)
    sub.add_argument("--step", type=whole(1), metavar="S", help="update of the run, from 1")
    sub.add_argument("--row", type=whole(1), metavar="R",
                     help="row of its batch, from 1, with text; default: a line each")  # fmt: skip
    sub.add_argument("--position", type=whole(0), metavar="P",
                     help="instead: the row at a position of the stream, from 0")  # fmt: skip
    sub.add_argument("--split", choices=("train", "valid"), default="train",
                     help="valid: held-out rows in order, by --position")  # fmt: skip
    sub.add_argument("--store", default="", metavar="NAME",
                     help="with --split valid, which of several stores")  # fmt: skip

    sub = verb(actions, "find", "the steps and rows at which a run sees a document")
    sub.add_argument("config", nargs="+", metavar="CONFIG", help=what)
    sub.add_argument("--doc", required=True, metavar="ID",
                     help="number of the document, or its origin as `data show` prints it: whole "
                     "or an unambiguous part at its start or end (reads all origins)")  # fmt: skip
    sub.add_argument(
        "--store", default="", metavar="NAME", help="its store, where there are several"
    )
    sub.add_argument("--steps", type=whole(1), metavar="N", help="look at no more than N steps")
    sub.add_argument("--first-step", type=whole(1), default=1, metavar="S", help="begin there")
    sub.add_argument("--limit", type=whole(1), default=10_000, metavar="N",
                     help="list at most so many sightings; all are counted")  # fmt: skip

    sub = verb(actions, "verify", "check every byte of stores; exit code 65 if any is wrong")
    sub.add_argument("stores", nargs="+", metavar="STORE", help="folder that `prepare` wrote")

    sub = verb(actions, "merge", "publish the store of `prepare --partitions` runs")
    sub.add_argument("destination", metavar="DEST", help="store to make, or one of the folders")
    sub.add_argument("folders", nargs="*", metavar="FOLDER", help="where the shares are")
