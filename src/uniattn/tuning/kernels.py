"""The kernels that a table may name, and a hash of their source, by which old measurements show."""

import functools
import hashlib
import io
import tokenize
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "kernels"
_MEANINGLESS = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
# A string that is a statement of its own, a docstring that is, follows one of these.
_BEFORE_A_STATEMENT = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


#: By name, as in `Tiles.kernel`: what of `uniattn/kernels` a call of it runs, files, and folders with all that is in them.
KERNELS = {"triton": ("blocks", "triton", "plan.py", "merge.py"), "hopper": ("blocks", "hopper", "plan.py", "merge.py")}


@functools.cache
def source_hash(name: str) -> str:
    """12 hex digits that change with the code of the kernel `name`, but not with its comments, docstrings or line breaks."""
    digest = hashlib.sha256()
    for source in KERNELS[name]:
        path = _FOLDER / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(_FOLDER).as_posix().encode())
            digest.update(code(file.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:12]


def code(text: str) -> str:
    """The tokens of a Python source that mean something, one a line."""
    kept: list[str] = []
    before, in_docstring = tokenize.NEWLINE, False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _MEANINGLESS:
            continue
        if token.type == tokenize.STRING and before in _BEFORE_A_STATEMENT:
            in_docstring = True
        elif in_docstring and token.type == tokenize.NEWLINE:
            in_docstring = False
        else:
            # Indents are told apart from dedents, but not by their width.
            kept.append(tokenize.tok_name[token.type] if token.type in _BEFORE_A_STATEMENT else token.string)
        before = token.type
    return "\n".join(kept)
