"""The config file: what it says, and what each mistake in it gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.api.job.config import SchedulerSection, load_config
from plait.api.job.from_config import AUTO, GO_ON, Resume, check_job, learning_rate, make_model, optimizer_factory
from plait.errors import BatchError, CheckpointError, ConfigError, DataError, LayoutError, PlaitError
from plait.plan.plan import Plan

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = "[model]\nlayers = 1\nwidth = 8\nheads = 2\nsequence = 16\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["bytes_gpt.toml", "demo.toml"])
def test_examples_are_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(EXAMPLES / name)
    monkeypatch.chdir(tmp_path)
    check_job(config, Plan(data=4))


@pytest.mark.parametrize(("name", "why"), [("x" * 300, "File name too long"), ("a\0b", "embedded null byte")])
def test_a_folder_that_cannot_be(name: str, why: str, tmp_path: Path) -> None:
    config = load_config(write(tmp_path, SMALL), ["data.source=" + str(tmp_path / "job.toml"), "train.batch_size=1"])
    train = config.train.model_copy(update={"out": name})
    with pytest.raises(ConfigError, match=f"cannot be a folder: {why}; name another"):
        check_job(config.model_copy(update={"train": train}), Plan())


def test_set_changes_values(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    config = load_config(path, ["train.steps=7", "train.out=runs/x", "optimizer.betas=[0.9, 0.95]", "model.width=16"])
    assert config.train.steps == 7 and config.train.out == "runs/x"
    assert config.optimizer.arguments == {"betas": [0.9, 0.95]} and config.model.arguments["width"] == 16


@pytest.mark.parametrize(
    ("text", "changes", "parts"),
    [
        ('[train]\nsteps = "many"', [], ["job.toml: train.steps = 'many'", "a whole number"]),
        ("[train]\nsteps = 1.5", [], ["train.steps = 1.5", "a whole number"]),
        ("[train]\nclip_norm = true", [], ["train.clip_norm = True", "a number"]),
        ("[train]\nsteps = 0", [], ["train.steps = 0", "greater than or equal to 1"]),
        ("[train]\nstpes = 5", [], ["unknown key train.stpes", "did you mean steps?"]),
        ("[train]\nlayers = 5", [], ["unknown key train.layers", "[train] has steps"]),
        ("[train]\nwarmup = 5", [], ["unknown key train.warmup", "did you mean scheduler.warmup?"]),
        ("[trian]\nsteps = 5", [], ["unknown key trian", "did you mean train?"]),
        ("train = 3", [], ["train = 3", "a table"]),
        ("[train\n", [], ["not valid TOML", "line 1"]),
        ("", ["train.steps=many"], ["--set: train.steps = 'many'", "a whole number"]),
        ("", ["a.b.c.d=3"], ["--set: unknown key a; the file has model"]),
        ("", ["train.seed=99999999999999999999"], ["--set: train.seed = 99999999999999999999", "less than"]),
        ("", ["steps=3"], ["cannot read --set 'steps=3'"]),
        ('[scheduler]\nname = "step"', [], ["scheduler.name = 'step'", "'cosine' or 'constant'"]),
        ("[train]\nsteps = 0\nseed = -1", [], ["train.steps = 0", "train.seed = -1"]),
    ],
)
def test_mistakes_name_file_key_and_value(tmp_path: Path, text: str, changes: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, text), changes)
    for part in parts:
        assert part in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no config file"):
        load_config(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "kind", "parts"),
    [
        ("[model]\nwidht = 8", ConfigError, ["unknown key model.widht", "did you mean width"]),
        ('[model]\nwidth = "8"', ConfigError, ["model.width = '8'", "a whole number"]),
        ("[model]\nheads = 3", ConfigError, ["[model]: heads = 3 does not divide width = 256"]),
        ('[model]\nname = "gpt"', ConfigError, ["model.name = 'gpt'", "bytes_gpt or 'module:function'"]),
        ('[model]\nname = "no_such_module_:f"', ConfigError, ["there is no module no_such_module_"]),
        ('[model]\nname = "os:system"\ncommand = "touch x"', ConfigError, ["os is a module of Python itself"]),
        ('[model]\nname = "plait.api.job.gpt:bytes_gtp"', ConfigError, ["has no function", "did you mean bytes_gpt"]),
        ('[optimizer]\nname = "Adamm"', ConfigError, ["optimizer.name = 'Adamm'", "AdamW"]),
        ("[optimizer]\nlearning_rate = 1", ConfigError, ["unknown key optimizer.learning_rate", "lr"]),
        ("[optimizer]\nbetas = [2.0, 0.9]", ConfigError, ["[optimizer] AdamW", "beta"]),
        ('[data]\nsource = "no/such/folder"', DataError, ["there is no text file or folder 'no/such/folder'"]),
        ("[data]\nsuorce = 1", ConfigError, ["unknown key data.suorce"]),
        ("[train]\nbatch_size = 7", BatchError, ["7 does not split over data=2", "such as 6"]),
        ("[train]\nbatch_size = 1000000", DataError, ["items to train on, fewer than train.batch_size"]),
        ('[layouts]\n"*.querry.weight" = "tensor, -"', LayoutError, ["matches no parameter", "did you mean"]),
        ('[layouts]\n"*.query.weight" = "tensor"', LayoutError, ["1 dims but blocks.0.query.weight has shape"]),
        ("[data]\nheld_out = 0.0\n[train]\nevaluate_every = 5", ConfigError, ["train.evaluate_every = 5", "held-out"]),
    ],
)
def test_jobs_that_cannot_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, kind: type[PlaitError], parts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as error:
        check_job(load_config(write(tmp_path, text)), Plan(data=2))
    for part in parts:
        assert part in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]  # nothing was written


def test_folder_of_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(write(tmp_path, SMALL + '[train]\nout = "run"'))
    with pytest.raises(CheckpointError, match="there is no checkpoint in run/checkpoints"):
        check_job(config, Plan(), GO_ON)
    check_job(config, Plan(), AUTO)
    (tmp_path / "run" / "checkpoints" / "step-00000004").mkdir(parents=True)  # of a save that was killed
    check_job(config, Plan())
    check_job(config, Plan(), AUTO)
    with pytest.raises(CheckpointError, match="it has no manifest.json.*--resume=auto begins anew"):
        check_job(config, Plan(), GO_ON)
    (tmp_path / "run" / "checkpoints" / "step-00000004" / "manifest.json").touch()
    with pytest.raises(CheckpointError, match=r"holds checkpoints of an earlier run \(step-00000004\).*--resume"):
        check_job(config, Plan())
    check_job(config, Plan(), writes=False)
    with pytest.raises(ConfigError, match="--checkpoint step-4 and --resume=auto exclude each other"):
        Resume(True, True, "step-4")


@pytest.mark.parametrize("key", ["out", "checkpoints", "scratch"])
def test_a_folder_has_a_name(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"train.{key} = ''; it should be text that is not empty"):
        load_config(write(tmp_path, f'[train]\n{key} = ""'))


def test_own_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_job.py").write_text(
        "import torch\n"
        "def model(width: int, deep: bool = False):\n"
        "    return torch.nn.Linear(width, 1), lambda m, b: m(b).mean()\n"
        "def wrong():\n    return 3\n"
        "def data(size: int):\n    return torch.utils.data.TensorDataset(torch.zeros(size, 4))\n"
    )
    monkeypatch.chdir(tmp_path)
    text = '[model]\nname = "own_job:model"\nwidth = 4\n[data]\nsource = "own_job:data"\nsize = 9\n'
    check_job(load_config(write(tmp_path, text)), Plan(data=2))
    for change, message in [
        ("data.size=5", "5 items to train on, fewer than train.batch_size = 8"),
        ("model.deep=3", "model.deep = 3; it should be true or false"),
        ("model.name=own_job:wrong", "unknown key model.width; it takes no arguments"),
        ("data.source=python", r"unknown key data.size; a text takes source"),
    ]:
        with pytest.raises(PlaitError, match=message):
            check_job(load_config(write(tmp_path, text), [change]), Plan(data=2))


def test_model_follows_from_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    one, two, other = (make_model(load_config(path, [f"train.seed={seed}"]))[0] for seed in (1, 1, 2))
    assert all(bool((a == b).all()) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not bool((other.head.weight == one.head.weight).all())  # type: ignore[union-attr, operator]


def test_optimizer_arguments(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, SMALL + '[optimizer]\nname = "SGD"\nlr = 0.1\nmomentum = 0.5'))
    optimizer = optimizer_factory(config)(make_model(config)[0].parameters())
    assert optimizer.param_groups[0]["lr"] == 0.1 and optimizer.param_groups[0]["momentum"] == 0.5


def test_tensorboard_that_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'plait\[tensorboard\]'"):
        check_job(load_config(write(tmp_path, SMALL + "[train]\ntensorboard = true")), Plan())


def test_learning_rate() -> None:
    section = SchedulerSection(warmup=4, final=0.1)
    rates = [learning_rate(step, section, 10) for step in range(11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
    assert rates[7] == pytest.approx(0.55) and rates[10] == pytest.approx(0.1)
    assert learning_rate(9, SchedulerSection(name="constant", warmup=4), 10) == 1.0
