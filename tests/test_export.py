"""An exported folder is the run's model, to transformers' own loader."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from precexp import run as running
from precexp.cli import compose
from precexp.data import build_tokenizer, eval_subset
from precexp.export import main
from precexp.precision import build_precision
from precexp.record import read_record
from precexp.train import evaluate
from tests.micro import MICRO
from tests.test_faults import files_up_to

CPU = torch.device("cpu")


def run(directory: Path, cache_dir: Path, *overrides: str) -> None:
    planned = compose(
        [*MICRO, f"data.cache_dir={cache_dir}", "train.lr=1e-2", "train.checkpoint_every=2",
         *overrides]
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "planned_memory", lambda *_: None)
        patch.setattr(running, "measured_memory", lambda *_, **__: None)
        running.run(planned.config, arm=planned.arm, directory=directory)


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "bf16_pure"])
def test_the_loaded_folder_has_the_eval_loss_of_the_run(
    precision: str, tmp_path: Path, cache_dir: Path
) -> None:
    run(tmp_path / "run", cache_dir, f"precision={precision}")
    assert main([str(tmp_path / "run")]) == 0
    folder = tmp_path / "run/export"
    config = compose([*MICRO, f"precision={precision}", f"data.cache_dir={cache_dir}"]).config
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation=config.model.attention
    )
    expected = torch.bfloat16 if precision == "bf16_pure" else torch.float32
    assert {param.dtype for param in model.parameters()} == {expected}
    blocks = eval_subset(running.read_blocks(config.model, config.data).eval, 2)
    recipe = build_precision(config.precision, device=CPU)
    loss = evaluate(model, blocks, recipe, batch_size=config.train.eval_batch_size)
    assert loss == read_record(tmp_path / "run/run.json").results["final_eval_loss"]


@pytest.mark.parametrize("optim", ["anyprecision", "anyprecision_packed"])
def test_float32_has_the_compensation_folded_in(
    optim: str, tmp_path: Path, cache_dir: Path
) -> None:
    run(tmp_path / "run", cache_dir, "precision=bf16_pure", f"optim={optim}")
    output = tmp_path / "full"
    assert main([str(tmp_path / "run"), "--dtype", "float32", "--output", str(output)]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    saved = tmp_path / "run/checkpoints/step-00000004"
    weights, states = (load_file(saved / f"{n}.safetensors") for n in ("model", "optimizer"))
    moved = 0
    for name, param in loaded.named_parameters():
        stored = weights[name].float()
        assert param.dtype == torch.float32
        assert ((param - stored).abs() <= stored.abs() * 2**-8).all()  # half an ulp, and a tie
        if optim == "anyprecision":
            assert torch.equal(param, stored + states[f"{name}/compensation"].float())
        moved += int((param != stored).sum())
    assert moved > 0


def test_the_tokenizer_encodes_as_the_run_did(tmp_path: Path, cache_dir: Path) -> None:
    run(tmp_path / "run", cache_dir)
    assert main([str(tmp_path / "run")]) == 0
    loaded = AutoTokenizer.from_pretrained(tmp_path / "run/export")
    ours = build_tokenizer(None, model_path=None, trust_remote_code=False)
    text = "It is a truth universally acknowledged.\n"
    assert loaded(text, add_special_tokens=False)["input_ids"] == ours.encode([text])[0]
    assert loaded.eos_token == "</s>"


def test_a_model_from_a_folder_is_exported_too(tmp_path: Path, cache_dir: Path) -> None:
    source = GPT2Config(vocab_size=2048, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    source.save_pretrained(tmp_path / "source")
    planned = compose(
        ["model=hf", f"model.path={tmp_path / 'source'}", "data.tokenizer=bundled",
         f"data.cache_dir={cache_dir}", *MICRO[5:], "train.checkpoint_every=4"]
    )  # fmt: skip
    running.run(planned.config, arm=planned.arm, directory=tmp_path / "run")
    assert main([str(tmp_path / "run")]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run/export")
    assert loaded.config.model_type == "gpt2"
    assert loaded.config.use_cache


def test_a_run_that_an_earlier_precexp_recorded_is_exported(
    tmp_path: Path, cache_dir: Path
) -> None:
    run(tmp_path / "run", cache_dir)
    path = tmp_path / "run/run.json"
    record = json.loads(path.read_text())
    del record["config"]["report"], record["config"]["train"]["probe_every"]
    del record["own_sha256"]
    path.write_text(json.dumps(record))
    assert main([str(tmp_path / "run")]) == 0


def test_an_initial_folder_starts_a_run_as_its_config_does(
    tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "first"
    assert main(["--init", *MICRO, "seed=3", f"path={folder}"]) == 0
    run(tmp_path / "direct", cache_dir, "seed=3")
    direct = read_record(tmp_path / "direct/run.json")
    expected = direct.evidence["init_hash"]
    said = capsys.readouterr().out.splitlines()[0]
    assert said == f"written: {folder}, opt-tiny of seed 3, init_hash {expected}"
    for name, overrides, seed in (
        ("again", [], 3),
        ("loaded", ["model.pretrained=true"], 3),
        ("other", ["model.pretrained=true", "data.tokenizer=null"], 4),
    ):
        same = ("model=hf", f"model.path={folder}", "model.attention=eager", f"seed={seed}")
        run(tmp_path / name, cache_dir, *same, *overrides)
        record = read_record(tmp_path / name / "run.json")
        assert record.evidence["init_hash"] == expected
        equal = record.results["final_eval_loss"] == direct.results["final_eval_loss"]
        assert equal == (seed == 3)  # the order of the batches is the seed's


def test_a_prepared_folder_is_begun_anew_with_other_layers_and_tokenizer(tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "fresh"
    GPT2Config(vocab_size=2048, n_embd=16, n_layer=1, n_head=2, n_positions=64).save_pretrained(
        source
    )
    overrides = ["model=hf", f"model.path={source}", "model.num_hidden_layers=3"]
    assert main(["--init", *overrides, "data.tokenizer=bundled", "--output", str(output)]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    assert (loaded.config.model_type, loaded.config.n_layer) == ("gpt2", 3)
    assert loaded.config.use_cache
    assert {param.dtype for param in loaded.parameters()} == {torch.float32}
    texts = ["It is a truth universally acknowledged.\n"]
    ours = build_tokenizer(None, model_path=str(output), trust_remote_code=False).encode(texts)
    bundled = build_tokenizer("bundled", model_path=None, trust_remote_code=False).encode(texts)
    assert ours == bundled


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--init", "model=opt-tiny"], "path: give one folder to write, as path=FOLDER"),
        (["--init", "path="], "path: give one folder to write, as path=FOLDER"),
        (["--init", "path=a", "--output=b"], "path: give one folder to write, as path=FOLDER"),
        (["--init", "path=a", "--dtype=stored"], "--dtype: allowed for a run alone"),
        (["--init", "path=taken"], "taken exists already; choose another folder"),
        (["--init", "path=a", "model=gpt-9"], "model: 'gpt-9' is not a choice; allowed: "),
        (["--init", "path=a", "model.width=3"], "model.width: unknown key; allowed: "),
        (["--init", "path=a", "model.vocab_size=100"], "data.tokenizer: bundled: 2,048 entries"),
        (["--init", "path=a", "model=hf", "model.path=no/where/at/all"], "model.path: 'no/where"),
        (["--init", "path=a", "data.tokenizer=no/where/at/all"], "data.tokenizer: 'no/where"),
        (["--init", "path=/proc/a", *MICRO], "[Errno 2] No such file or directory: '/proc/a'"),
        (["one", "two"], "RUN: give the directory of one run, or --init with overrides"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_mistakes_about_an_initial_folder_are_one_line_and_leave_none(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    Path("taken/file").touch()
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"precexp: {message}"), line
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_mistakes_are_one_line(
    tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", cache_dir, "train.checkpoint_every=null")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/sweep.json").touch()
    for arguments, words in (
        ([str(tmp_path / "sweep")], "sweep: a sweep; give the directory of one of its runs"),
        ([str(tmp_path / "nowhere")], "run.json: not found"),
        ([str(tmp_path / "run")], "no whole checkpoint in it to export; run with train.checkpoint"),
        ([str(tmp_path / "run"), f"--output={tmp_path / 'taken'}"], "taken exists already"),
    ):
        capsys.readouterr()
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert words in error
        assert len(error.splitlines()) == 1


@pytest.mark.parametrize("room", [100, 5_000, 80_000])
def test_a_full_disk_is_one_line_and_leaves_no_half_of_a_folder(
    room: int, tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", cache_dir, "model.hidden_size=64")
    arguments = [str(tmp_path / "run")]
    capsys.readouterr()
    with files_up_to(room):
        assert main(arguments) == 2
    error = capsys.readouterr().err
    assert os.strerror(errno.EFBIG) in error
    assert "Traceback" not in error
    assert main(arguments) == 0
