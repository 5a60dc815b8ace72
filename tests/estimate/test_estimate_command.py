"""python -m fsdp_c estimate."""

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_c._estimate import _command, estimate
from fsdp_c._estimate._models import CONFIGS, build
from fsdp_c._install import _launch

SMALL = "--layers 5 --hidden 64 --heads 4 --vocabulary 100 --seq 16 --world-size 4".split()
MAKER = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
    def forward(self, tokens):
        return self.head(self.embedding(tokens))
make = Net
word = "no function"
"""


def test_says_what_the_function_says(capsys) -> None:
    for kind in ("gpt", "llama"):
        _command.main(["--model", kind, *SMALL, "--kv-heads", "2", "--checkpoint", "--sources"])
        text = capsys.readouterr().out
        sizes = {"layers": 5, "hidden": 64, "heads": 4, "vocabulary": 100, "kv_heads": 2}
        model = build(CONFIGS[kind].replaced(**sizes, sequence=16))
        found = estimate(model, world_size=4, seq=16, checkpoint=True)
        assert text.startswith(str(found)) and "NVIDIA H100 SXM data sheet" in text


def test_other_models_and_mistakes(capsys, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "my_model.py").write_text(MAKER)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "transformers", None)
    _command.main("--model my_model:make --world-size 2 --seq 4 --optimizer none".split())
    text = capsys.readouterr().out
    _command.main("--world-size 2 --hardware here --sources".split() + SMALL[:-2])
    assert "2 x here on 1 host" in (here := capsys.readouterr().out) and "by one thread" in here
    assert "what malloc keeps of freed tensors (in measured runs 2 to 25 %" in here
    assert "Net of 170 parameters" in text and "optimizer  " not in text.partition("time")[0]
    for words, message in (
        ("--model my_model:word", "module my_model has no function word"),
        ("--model my_model:make --layers 3", "--layers is for gpt and llama, not my_model:make"),
        ("--model config.json", "needs transformers to be installed"),
        ("--model what", "--model what is none of gpt"),
        ("--optimizer Best", "torch.optim has no Best"),
        ("--strategy zero9", "unknown strategy 'zero9'"),
        ("--strategy hybrid --shards 3", "do not divide"),
        ("--measured 2:1e9", "no speed of work makes that 1e\\+09"),
    ):
        with pytest.raises(SystemExit, match=message):
            _command.main([*words.split(), "--world-size", "2"])
    _command.main([*SMALL, "--measured", "2:0.0002"])
    assert "0.0002 s were measured on 2 ranks" in capsys.readouterr().out
    for words, text in (
        ("--help", "--world-size"),
        ("--measured 2", "'2': pass ranks and seconds"),
    ):
        with pytest.raises(SystemExit):
            _command.main([*SMALL, *words.split()])
        assert text in "".join(capsys.readouterr())


def test_scripts_of_that_name(tmp_path: Path, capsys) -> None:
    (tmp_path / "estimate").write_text("import sys; print(sys.argv, 'torch' in sys.modules)")
    command = [sys.executable, "-m", "fsdp_c", "./estimate", "x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['./estimate', 'x'] False", done.stderr
    with pytest.raises(SystemExit):
        _launch.main(["estimate"])
    assert "the following arguments are required: --world-size" in capsys.readouterr().err
