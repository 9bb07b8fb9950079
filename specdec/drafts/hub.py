"""Drafts on the Hugging Face hub: a folder of one that is downloaded, a model card, and a folder that is uploaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

PATTERNS = ["*.json", "*.safetensors", "*.bin", "medusa_lm_head.pt", "*.model", "*.txt", "*.jinja"]
CARD = "README.md"


def folder_of(name: str | os.PathLike[str]) -> Path:
    """A path as it is; of a hub id, ``"owner/name"``, the local copy of what the hub has.

    Raises:
        FileNotFoundError: the hub has no such name, or does not answer.
    """
    path = Path(name)
    if not isinstance(name, str) or path.exists() or name.startswith((".", "~", "/")) or name.count("/") != 1:
        return path
    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise FileNotFoundError(
            f"{name!r} is no folder, and it could not be read from the hub ({error}): give the folder of a saved draft, or a hub id"
        ) from error


def push(
    save: Callable[[Path], None],
    name: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    message: str = "Upload a draft",
) -> str:
    """Upload what ``save`` writes to the hub, and return the address of the commit. A model card that the hub has stays as it is.

    Args:
        save: writes a folder. name: the hub id; the repository is made if there is none. private: whether a new repository is. token: of the
            hub; ``None``: the one that ``hf auth login`` stored. revision: a branch that exists. message: of the commit.
    """
    api = HfApi(token=token)
    with TemporaryDirectory() as folder:
        save(Path(folder))
        made = api.create_repo(name, private=private, exist_ok=True)
        if api.file_exists(made.repo_id, CARD, revision=revision):
            (Path(folder) / CARD).unlink(missing_ok=True)
        done = api.upload_folder(
            repo_id=made.repo_id, folder_path=folder, commit_message=message, revision=revision
        )
    return str(done.commit_url)


def write_card(folder: Path, kind: str, what: str, target: str, read: str) -> None:
    """A model card, unless the folder has one.

    Args:
        kind: of the draft, for the title and the tags. what: a sentence. target: its fingerprint, empty where it is unknown. read: a line of
            code that makes a draft, ``draft``, from the ``target``.
    """
    if (folder / CARD).exists():
        return
    made_for = (
        f"It was made for the target with the fingerprint `{target}` (`specdec.models.fingerprint`)."
        if target
        else "The fingerprint of its target was not recorded."
    )
    (folder / CARD).write_text(
        f"""---
library_name: specdec
tags:
- speculative-decoding
- {kind.lower()}
---

# {kind}

{what} It drafts tokens for speculative decoding. It is no language model of its own: it reads the activations of its target. {made_for}

```python
import specdec as sd

target = sd.HFModel.from_pretrained("...")  # the model that this draft was made for
{read}
decoder = sd.decoder(target).draft(draft, length=4).build()
print(decoder.generate(["..."], max_new_tokens=64).texts[0])
```

The output has exactly the target's distribution, whatever the draft proposes.
""",
        encoding="utf-8",
    )
