"""python -m precexp.export RUN [--output FOLDER] [--dtype stored|float32]
python -m precexp.export --init path=FOLDER [key=value ...]

Writes a model as a Hugging Face folder (weights as safetensors, config, tokenizer) that
from_pretrained loads.

Of a RUN it is the model of the last checkpoint. `stored` keeps the dtype that the run trained in,
and gives the run's eval loss; `float32` adds what a Kahan compensation holds of each weight. The
folder is RUN/export unless told otherwise.

With --init it is the float32 model that a run of the overrides begins with, and the tokenizer of
data.tokenizer. model=hf model.path=FOLDER then begins with the same weights: by the same seed, or
by model.pretrained=true whatever the seed.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from precexp import set_process_defaults
from precexp.cli import compose
from precexp.config import NOT_HASHED, RunConfig, UserError, as_dict, load
from precexp.record import RunRecord, read_record

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Dtype = Literal["stored", "float32"]


def main(arguments: Sequence[str]) -> int:
    """Exit code 0; 2 with one line on stderr for what cannot be exported or written."""
    set_process_defaults()
    parser = argparse.ArgumentParser(
        prog="python -m precexp.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what", nargs="+", metavar="RUN | key=value", help="a run's directory, or overrides"
    )
    parser.add_argument("--init", action="store_true", help="a model that was not trained yet")
    parser.add_argument("--output", type=Path, help="the folder to write")
    parser.add_argument("--dtype", choices=["stored", "float32"], help="of a run; default stored")
    args = parser.parse_intermixed_args(arguments)
    try:
        print(_export_initial(args) if args.init else _export_run(args))
    except (UserError, OSError) as error:
        print(f"precexp: {error}", file=sys.stderr)
        return 2
    return 0


def _export_run(args: argparse.Namespace) -> str:
    if len(args.what) != 1:
        raise UserError("RUN: give the directory of one run, or --init with overrides")
    run = Path(args.what[0])
    output = args.output or run / "export"
    step = export(run, output, dtype=args.dtype or "stored")
    return f"written: {output}, the model after step {step}"


def _export_initial(args: argparse.Namespace) -> str:
    if args.dtype is not None:
        raise UserError("--dtype: allowed for a run alone; a model that was not trained is float32")
    paths = [text.removeprefix("path=") for text in args.what if text.startswith("path=")]
    paths += [] if args.output is None else [args.output]
    if len(paths) != 1 or not paths[0]:
        raise UserError("path: give one folder to write, as path=FOLDER")
    output = Path(paths[0])
    overrides = [text for text in args.what if not text.startswith("path=")]
    config, digest = export_initial(overrides, output)
    return f"written: {output}, {config.model.name} of seed {config.seed}, init_hash {digest}"


def export_initial(overrides: Sequence[str], output: Path) -> tuple[RunConfig, str]:
    """Writes the folder; returns the config composed of the overrides and the model's init_hash.

    Raises UserError for what the command line would refuse, for a tokenizer with more entries than
    the model's vocabulary, and for a folder that is not empty.
    """
    config = compose(overrides).config
    _require_free(output)

    from precexp.data.tokenizer import build_tokenizer, require_vocabulary
    from precexp.model import build_model, init_hash, read_model_config

    architecture = read_model_config(config.model)
    tokenizer = build_tokenizer(
        config.data.tokenizer,
        model_path=config.model.path,
        trust_remote_code=config.model.trust_remote_code,
    )
    require_vocabulary(tokenizer, vocab_size=architecture.vocab_size)
    model = build_model(config.model, seed=config.seed)
    digest = init_hash(model)
    _write_folder(model, config, output)
    return config, digest


def export(run: Path, output: Path, *, dtype: Dtype) -> int:
    """Writes the folder; returns the step that the model is of.

    Raises UserError for a run that is not there, is a sweep or has no whole checkpoint, and for a
    folder that is not empty.
    """
    if (run / "sweep.json").exists():
        raise UserError(f"{run}: a sweep; give the directory of one of its runs")
    record = read_record(run / "run.json")
    _require_free(output)
    config = _config_of(record, run)

    import torch  # seconds

    from precexp.checkpoint import load_tensors, newest_checkpoint
    from precexp.model import build_model
    from precexp.optim import AnyPrecisionAdamW, build_optimizer
    from precexp.precision import build_precision

    checkpoint = newest_checkpoint(run / "checkpoints")
    if checkpoint is None or checkpoint.facts["config_hash"] != record.config_hash:
        raise UserError(
            f"{run}: no whole checkpoint in it to export; run with train.checkpoint_every=STEPS"
        )
    last = (record.results or {}).get("steps")
    if last is not None and checkpoint.step != last:
        print(f"the run went on to step {last}; its last checkpoint is older", file=sys.stderr)

    # Weights come from the checkpoint: neither a hub nor the pretrained ones are needed again.
    model = build_model(replace(config.model, pretrained=False), seed=config.seed)
    optimizer = build_optimizer(model.parameters(), config.optim, config.train, seed=config.seed)
    recipe = replace(config.precision, allow_emulated_bf16=True)  # nothing is computed
    build_precision(recipe, device=torch.device("cpu")).cast_parameters(model)
    load_tensors(checkpoint, model=model, optimizer=optimizer)
    if dtype == "float32":
        params = [param for group in optimizer.param_groups for param in group["params"]]
        full = (
            optimizer.master_weights()
            if isinstance(optimizer, AnyPrecisionAdamW)
            else [param.detach().float() for param in params]
        )
        for param, weight in zip(params, full, strict=True):
            param.data = weight
    _write_folder(model, config, output)
    return checkpoint.step


def _require_free(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists already; choose another folder")


def _write_folder(model: "PreTrainedModel", config: RunConfig, output: Path) -> None:
    """Writes it whole, or leaves none and raises; the tokenizer first, since it may be gone."""
    from precexp.data.tokenizer import save_tokenizer

    try:
        save_tokenizer(
            config.data.tokenizer,
            output,
            model_path=config.model.path,
            trust_remote_code=config.model.trust_remote_code,
        )
        model.config.use_cache = True  # off while training; what loads it may want to generate
        model.save_pretrained(output)
    except BaseException as error:
        if output.is_dir():  # it was free
            shutil.rmtree(output, ignore_errors=True)
        if isinstance(error, UserError | OSError) or not isinstance(error, Exception):
            raise
        # A full disk is a bare Exception in tokenizers, and a SafetensorError in safetensors.
        raise OSError(f"{output}: not written ({error})") from error


def _config_of(record: RunRecord, run: Path) -> RunConfig:
    """Of keys that change no number of a run the defaults: an earlier precexp had fewer of them."""
    from omegaconf import OmegaConf

    recorded, defaults = (
        OmegaConf.create(record.config),
        OmegaConf.create(as_dict(compose([]).config)),
    )
    for key in NOT_HASHED:
        OmegaConf.update(recorded, key, OmegaConf.select(defaults, key), merge=False)
    try:
        return load(recorded)
    except UserError as error:
        raise UserError(f"{run}: recorded by another precexp ({error})") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
