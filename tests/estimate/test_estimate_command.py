"""python -m fsdp_c estimate."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsdp_c import _text
from fsdp_c._estimate import _command, estimate
from fsdp_c._estimate._flags import in_flags
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
class Wide(Net):
    def __init__(self, width):
        super().__init__()
len_of = lambda: 3
"""
PICTURES = """
import torch
from torch import nn
import beside_it
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.words = nn.Conv2d(3, beside_it.WIDTH, 3), nn.Embedding(10, 8)
    def forward(self, x, words):
        return self.layer(x).mean((2, 3)) + self.words(words).mean(1)
class Counted(Net):
    def __init__(self):
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 1, 3)]
net = Net()
"""


def test_says_what_the_function_says(capsys) -> None:
    for kind in ("gpt", "llama"):
        _command.main(["--model", kind, *SMALL, "--kv-heads", "2", "--checkpoint", "--sources"])
        text = capsys.readouterr().out
        sizes = {"layers": 5, "hidden": 64, "heads": 4, "vocabulary": 100, "kv_heads": 2}
        model = build(CONFIGS[kind].replaced(**sizes, sequence=16))
        found = estimate(model, world_size=4, seq=16, checkpoint=True)
        assert text.startswith(str(found)) and "NVIDIA H100 SXM data sheet" in text


def test_optimizers_of_ones_own(capsys, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "optimizers.py").write_text(
        "import torch\ndef heavy(params):\n    return torch.optim.SGD(params, lr=1, momentum=0.9)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["--optimizer", "optimizers.py:heavy"]
    _command.main([*SMALL, *words])
    model = build(
        CONFIGS["gpt"].replaced(layers=5, hidden=64, heads=4, vocabulary=100, sequence=16)
    )
    momentum = functools.partial(torch.optim.SGD, lr=1, momentum=0.9)
    found = estimate(model, world_size=4, seq=16, optimizer=momentum)
    assert capsys.readouterr().out.startswith(str(found))
    for words, message in (
        (["--optimizer", "optimizers.py:havy"], "has no function havy; did you mean 'heavy'"),
        (["--optimizer", "LBFGS"], "or --optimizer None to count none"),
    ):
        with pytest.raises(SystemExit, match=re.escape(message)):
            _command.main([*SMALL, *words])
    for none in ("None", "none"):
        _command.main([*SMALL, "--optimizer", none])


def test_other_models_and_mistakes(capsys, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "my_model.py").write_text(MAKER)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "transformers", None)
    _command.main("--model my_model:make --world-size 2 --seq 4 --optimizer none".split())
    text = capsys.readouterr().out
    _command.main([*SMALL[:-2], *"--world-size 2 --hardware here --sources".split()])
    assert "; 2 CPU ranks on this host; " in (here := capsys.readouterr().out)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    whole, half = _text.bytes_text(memory), _text.bytes_text(memory // 2)
    assert f"of {half}, a host's {whole} among the 2 ranks on it: " in here
    assert "by one thread" in here
    _command.main([*SMALL, *"--ranks-per-host 2 --hardware here".split()])
    assert "; 4 CPU ranks on 2 hosts like this one; " in capsys.readouterr().out
    assert "what malloc keeps of freed tensors (in measured runs 2 to 25 %" in here
    assert "Net of 170 parameters" in text and "optimizer  " not in text.partition("time")[0]
    for words, message in (
        ("--model my_model:word", "module my_model has no function word"),
        ("--model my_model:make --layers 3", "--layers is for gpt and llama, not my_model:make"),
        ("--model config.json", "needs transformers to be installed"),
        ("--model my_model:Nett", "has no function Nett; did you mean 'Net'"),
        ("--model my_model:Wide", r"my_model:Wide\(width\) is called without arguments"),
        ("--model my_model:len_of", "returned a int, not a module"),
        ("--model my_modle:make", "there is no module my_modle on the path"),
        ("--model elsewhere.py:make", "there is no file elsewhere.py"),
        ("--model my_model.py", "names no function as module:function"),
        ("--model what", "--model what is none of gpt"),
        ("--model lama-8b", "did you mean 'llama-8b'"),
        ("--optimizer Best", "torch.optim has no optimizer 'Best'"),
        ("--optimizer adamw", "did you mean 'AdamW'"),
        ("--precision bf61", "did you mean 'bf16'"),
        ("--hardware h10", "did you mean 'h100'"),
        ("--precision bf61", "--precision bf61: use one of"),
        ("--world-size 0", "--world-size 0: pass a whole number"),
        ("--strategy ddp --offload", "use --strategy zero2"),
        ("--model my_model:make --inputs 2x3", r"of the.*; let --inputs name what its forward"),
        ("--inputs 2x0", "write sizes such as 8x3x224x224"),
        ("--inputs long:", "write sizes such as 8x3x224x224"),
        ("--inputs lung:2", "torch has no dtype 'lung'; did you mean 'long'"),
        ("--inputs 2x3 --seq 4", "leave out --seq and --batch"),
        ("--strategy zero9", "unknown strategy 'zero9'"),
        ("--strategy hybrid --shards 3", "do not divide .*: pass --shards or another --world-size"),
        ("--measured 2:1e9", "no speed of work makes that 1e\\+09"),
    ):
        with pytest.raises(SystemExit, match=message):
            _command.main(["--world-size", "2", *words.split()])
    _command.main([*SMALL, "--measured", "2:0.0002"])
    assert "0.0002 s were measured on 2 ranks" in capsys.readouterr().out
    for words, text in (
        ("--help", "--world-size"),
        ("--measured 2", "'2': pass ranks and seconds"),
    ):
        with pytest.raises(SystemExit):
            _command.main([*SMALL, *words.split()])
        assert text in "".join(capsys.readouterr())


def test_any_model_and_inputs(capsys, tmp_path: Path, monkeypatch) -> None:
    """Of a file that imports what lies beside it; also one that the meta device cannot build."""
    (tmp_path / "apart").mkdir()
    (tmp_path / "apart/pictures.py").write_text(PICTURES)
    (tmp_path / "apart/beside_it.py").write_text("WIDTH = 8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    inputs = "--inputs 4x3x32x32,long:4x16 --world-size 2"
    with pytest.raises(
        SystemExit, match="; without --inputs it gets token ids: name with --inputs"
    ):
        _command.main("--model apart/pictures.py:Net --world-size 2".split())
    texts = []
    for name in ("Net", "net", "Counted"):
        _command.main(["--model", f"apart/pictures.py:{name}", *inputs.split()])
        said = capsys.readouterr()
        assert ("is built in memory" in said.err) == (name == "Counted"), said.err
        texts.append(said.out.replace("Counted of", "Net of"))
    assert texts[0] == texts[1] == texts[2]
    assert "Net of 304 parameters" in texts[0] and "4x3x32x32, 4x16 per rank" in texts[0]
    made = sys.modules["pictures"].Net()
    x = torch.empty(4, 3, 32, 32), torch.empty(4, 16, dtype=torch.long)
    assert texts[0] == f"{estimate(made, world_size=2, inputs=x)}\n"


def test_help_says_every_default() -> None:
    options = [a for a in _command.parser()._actions if a.option_strings and a.dest != "help"]
    assert len(options) > 20
    for option in options:
        assert option.help is not None and "default" in option.help, option.option_strings
        if option.default not in (None, False):
            assert "%(default)s" in option.help, option.option_strings


def test_names_of_models_and_optimizers() -> None:
    """As the command line knows them, in Python too."""
    assert estimate("llama-7b", world_size=8).n_parameters == 6_738_415_616  # as Meta's has
    by_name = estimate("gpt", world_size=2, seq=64, optimizer="SGD")
    model = build(CONFIGS["gpt"].replaced(sequence=64))
    same = estimate(model, world_size=2, seq=64, optimizer=torch.optim.SGD)
    assert str(by_name) == str(same)
    for given, message in (
        ({"model": "gtp"}, "there is no model 'gtp': use one of .*; did you mean 'gpt'"),
        ({"optimizer": "adam_w"}, "no optimizer 'adam_w'; did you mean 'AdamW'"),
        ({"optimizer": "Optimizer"}, "no optimizer 'Optimizer'"),
        ({"optimizer": "zzz"}, "no optimizer 'zzz'$"),
    ):
        with pytest.raises(ValueError, match=message):
            estimate(given.pop("model", "gpt"), world_size=2, **given)


def test_scripts_of_that_name(tmp_path: Path, capsys) -> None:
    (tmp_path / "estimate").write_text("import sys; print(sys.argv, 'torch' in sys.modules)")
    command = [sys.executable, "-m", "fsdp_c", "./estimate", "x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['./estimate', 'x'] False", done.stderr
    with pytest.raises(SystemExit):
        _launch.main(["estimate"])
    assert "the following arguments are required: --world-size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ('checkpoint=True + strategy="zero2": 1 GiB', "--checkpoint + --strategy zero2: 1 GiB"),
        ("precision='bf61': use one of fp32", "--precision bf61: use one of fp32"),
        ("world_size=16: 2 GiB, 0.1 s", "--world-size 16: 2 GiB, 0.1 s"),
        ("measured=(8, 2.9): no speed", "--measured 8:2.9: no speed"),
        ("pass shards= or another world_size=", "pass --shards or another --world-size"),
        ("batch=4: 3 GiB", "--batch 4: 3 GiB"),
    ],
)
def test_says_flags_in_the_place_of_arguments(said: str, shown: str) -> None:
    assert in_flags(said, has_inputs=False) == shown


def test_a_batch_of_inputs_has_no_flag_of_its_own() -> None:
    assert in_flags("batch=4: 3 GiB", has_inputs=True) == "--inputs of batches of 4: 3 GiB"
