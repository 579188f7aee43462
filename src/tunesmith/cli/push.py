"""Upload a trained model and its model card to the Hugging Face Hub."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from tunesmith.cli.parser import add_flags
from tunesmith.errors import ConfigError, ResourceError, short_text
from tunesmith.inference.model_folder import INSTALL_RUNTIME, is_graph_folder, model_folder_of, read_facts

LOADING = """
## How to load

{runtime}```python
from huggingface_hub import snapshot_download
from tunesmith import Predictor

Predictor.load(snapshot_download("{repo}")).predict({example})
```
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    flags = {
        "run RUN": "Run folder with a finished model, or an exported folder.",
        "repo REPO": "Repository on the Hub: user/name.",
        "--private": "Make the repository private.",
        "--revision NAME": "Branch to upload to. Default: main.",
    }
    add_flags(parser, flags)


def run(args: argparse.Namespace) -> int:
    """Upload the model and print the URL of the commit."""
    print(push_model(args.run, args.repo, private=args.private, revision=args.revision))
    return 0


def push_model(path: str | Path, repo: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload all files of the folder and return the URL of the commit. The token is that of `hf auth login`."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ConfigError(f"{repo!r} is not the name of a repository", fix="Use the form user/name.")
    folder = model_folder_of(path).folder
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "README.md")
    text = _card_for(folder, repo)
    operations = [CommitOperationAdd(p.relative_to(folder).as_posix(), str(p)) for p in files]
    operations.append(CommitOperationAdd("README.md", text.encode()))
    api = HfApi()
    try:
        made = api.create_repo(repo, private=private, exist_ok=True)
        done = api.create_commit(made.repo_id, operations, commit_message="Upload from tunesmith", revision=revision)
    except (HfHubHTTPError, OSError) as error:
        problem = f"the Hub refused or could not be reached ({short_text(error)})"
        fix = "Log in with `hf auth login`, and check the name and the network."
        raise ResourceError(problem, where=repo, fix=fix) from None
    return str(done.commit_url)


def _card_for(folder: Path, repo: str) -> str:
    """Return the card of the folder, with the repository instead of the folder, and how to load the model from it."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else f"# {repo.partition('/')[2]}\n"
    example = read_facts(folder).example
    if is_graph_folder(folder):
        text, runtime = text.partition("## Use\n")[0], f"{INSTALL_RUNTIME}\n\n"
    else:
        text, runtime = text.replace('"text-classification", "model")', f'"text-classification", "{repo}")'), ""
    return text.rstrip() + "\n" + LOADING.format(repo=repo, example=example, runtime=runtime)
