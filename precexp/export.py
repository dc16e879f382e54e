"""python -m precexp.export RUN [--output FOLDER] [--dtype stored|float32]

Writes the model of a run's last checkpoint as a Hugging Face folder (weights as safetensors,
config, tokenizer) that from_pretrained loads. `stored` keeps the dtype that the run trained in, and
gives the run's eval loss; `float32` adds what a Kahan compensation holds of each weight. The folder
is RUN/export unless told otherwise.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from precexp import set_process_defaults
from precexp.config import RunConfig, UserError, load
from precexp.record import RunRecord, read_record

Dtype = Literal["stored", "float32"]


def main(arguments: Sequence[str]) -> int:
    """Exit code 0; 2 with one line on stderr for what cannot be exported or written."""
    set_process_defaults()
    parser = argparse.ArgumentParser(
        prog="python -m precexp.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="the directory of a run")
    parser.add_argument("--output", type=Path, help="the folder to write")
    parser.add_argument("--dtype", choices=["stored", "float32"], default="stored")
    args = parser.parse_args(arguments)
    output = args.output or args.run / "export"
    try:
        step = export(args.run, output, dtype=args.dtype)
    except (UserError, OSError) as error:
        print(f"precexp: {error}", file=sys.stderr)
        return 2
    print(f"written: {output}, the model after step {step}")
    return 0


def export(run: Path, output: Path, *, dtype: Dtype) -> int:
    """Writes the folder; returns the step that the model is of.

    Raises UserError for a run that is not there or has no whole checkpoint, and for a folder that
    is not empty.
    """
    record = read_record(run / "run.json")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output: {output} exists already; choose another folder")
    config = _config_of(record, run)

    import torch  # seconds

    from precexp.checkpoint import load_tensors, newest_checkpoint
    from precexp.data.tokenizer import save_tokenizer
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
    model.config.use_cache = True  # off while training; what loads it may want to generate
    model.save_pretrained(output)
    save_tokenizer(
        config.data.tokenizer,
        output,
        model_path=config.model.path,
        trust_remote_code=config.model.trust_remote_code,
    )
    return checkpoint.step


def _config_of(record: RunRecord, run: Path) -> RunConfig:
    from omegaconf import OmegaConf

    try:
        return load(OmegaConf.create(record.config))
    except UserError as error:
        raise UserError(f"{run}: recorded by another precexp ({error})") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
