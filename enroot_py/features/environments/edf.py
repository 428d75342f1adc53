"""The content of an environment file. edf_parser.py reads the file; for a step, it does so at submission.

Nodes get the content with the step, as text, and need no access to the file. Each step with an environment file waits
for the import of this module, so it does not import re, and imports json only within functions. Source of the format:
docs.cscs.ch, "EDF reference".
"""

from __future__ import annotations

from enroot_py.base.errors import ConfigError
from enroot_py.base.frozen import Frozen
from enroot_py.config.words import true_or_false
from enroot_py.features.environments import expansion

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

DEFAULT = "the default of environment files"
DEFAULTS = {"entrypoint": False, "writable": True}


def is_of_job(variable: str) -> bool:
    """Return whether only the running job knows a variable. At submission, it may still have another job's value."""
    return variable.startswith("SLURM_")


def is_path(name: str) -> bool:
    """Return whether this is a path; otherwise it is a name to search for."""
    return "/" in name or name.startswith(".")


class FileEntry(Frozen):
    """One value of a file, as ``text``. ``origin`` is FILE:LINE.

    ``key`` is a top-level key. ``name`` is empty, or the name of a variable or an annotation below the key.
    """

    key: str
    name: str
    text: str
    origin: str

    @property
    def where(self) -> str:
        """The place in messages: FILE:LINE: KEY."""
        return f"{self.origin}: {self.name or self.key}"


class Environment(Frozen):
    """The content of a file and its bases. If entries exclude each other, the last entry counts.

    ``name`` is the requested name, and ``path`` the path of the file. ``host`` has those variables of the caller that
    the entries use.
    """

    name: str
    path: str
    entries: tuple[FileEntry, ...]
    host: Mapping[str, str]

    def all(self, key: str) -> Iterator[FileEntry]:
        return (entry for entry in self.entries if entry.key == key)

    def last(self, key: str) -> FileEntry | None:
        """Return the last entry of a key, or None. An empty text counts as no entry, except for the key image."""
        entries = list(self.all(key))
        return entries[-1] if entries and (entries[-1].text or key == "image") else None

    def by_name(self, key: str) -> dict[str, FileEntry]:
        """Return the entries of a table by name."""
        return {entry.name: entry for entry in self.all(key)}

    def flag(self, key: str) -> tuple[bool, str]:
        """Return whether a key is true, and the origin of its value."""
        entry = self.last(key)
        return (bool(true_or_false(entry.text)), entry.where) if entry else (DEFAULTS[key], DEFAULT)

    def annotation(self, name: str) -> tuple[bool, str] | None:
        """Return whether an annotation is true, and its origin; None if it is unset or empty. Raises ConfigError."""
        entry = self.by_name("annotations").get(name)
        if entry is None:
            return None
        text = self.value(entry)
        try:
            value = true_or_false(text)
        except ValueError as e:
            raise ConfigError(f"{entry.where}={e}: neither true nor false", hint=f'write {name} = "true"') from None
        return None if value is None else (value, entry.where)

    @staticmethod
    def needs_job(text: str) -> bool:
        """Return whether a value has a variable that only the job knows."""
        return any(map(is_of_job, expansion.names(text)))

    def value(self, entry: FileEntry, job: Mapping[str, str] | None = None) -> str:
        """Return the text of an entry with variables expanded. Without a job, leave variables of the job unexpanded.

        Raises ConfigError.
        """
        return self._expand(entry, (self.host,), job)

    def mount(self, entry: FileEntry, job: Mapping[str, str] | None = None) -> str:
        """Return a mount in the syntax of --container-mounts, with the separators in values of variables escaped."""
        return self._expand(entry, (self.host,), job, _quoted)

    def variables(self, image: Mapping[str, str], job: Mapping[str, str]) -> dict[str, tuple[str | None, str]]:
        """Return the values of the variables in [env], or None to unset a variable, each with its origin.

        ``image`` has the variables of the image. Raises ConfigError.
        """
        known = (image, self.host)
        entries = self.by_name("env").items()
        return {name: (self._expand(entry, known, job) or None, entry.origin) for name, entry in entries}

    def devices(self, job: Mapping[str, str]) -> list[str]:
        """Return the devices of all entries. Raises ConfigError."""
        return [self.value(entry, job) for entry in self.all("devices")]

    def for_hooks(self, job: Mapping[str, str] | None) -> dict[str, str]:
        """Return PENROOT_ANNOTATIONS: a line KEY=VALUE for each annotation without a line break. Raises ConfigError."""
        values = {name: self.value(entry, job) for name, entry in self.by_name("annotations").items()}
        lines = [f"{name}={text}" for name, text in values.items() if "\n" not in name + text]
        return {"PENROOT_ANNOTATIONS": "\n".join(lines)} if lines else {}

    def _expand(
        self,
        entry: FileEntry,
        known: tuple[Mapping[str, str], ...],
        job: Mapping[str, str] | None,
        quote: Callable[[str], str] = str,
    ) -> str:
        def value(name: str) -> str | None:
            if job is None and is_of_job(name) and not any(name in variables for variables in known):
                raise expansion.NotYetKnown
            return next((variables[name] for variables in (*known, job or {}) if name in variables), None)

        try:
            return expansion.expand(entry.text, value, quote)
        except ValueError as e:
            why, hint = e.args
            raise ConfigError(f"{entry.where}: {why}", hint=hint) from None

    def dumps(self) -> str:
        """Return the content as JSON text, which the nodes get in a variable of the job."""
        import json

        entries = [[entry.key, entry.name, entry.text, entry.origin] for entry in self.entries]
        content = {"name": self.name, "path": self.path, "entries": entries, "host": dict(self.host)}
        return json.dumps(content, separators=(",", ":"))


def loads(text: str) -> Environment:
    """Parse the output of dumps(). Raises ConfigError for anything else."""
    import json

    try:
        content = json.loads(text)
        entries = tuple(FileEntry(*map(str, entry)) for entry in content["entries"])
        host = {str(name): str(value) for name, value in content["host"].items()}
        if any(len(entry) != len(FileEntry.__annotations__) for entry in content["entries"]):
            raise ValueError("an entry has the wrong number of fields")
        return Environment(str(content["name"]), str(content["path"]), entries, host)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        message = f"PYXIS_EDF, the content of the step's environment file, does not parse: {e}"
        raise ConfigError(message, hint="unset PYXIS_EDF: srun and sbatch set it themselves") from e


def _quoted(text: str) -> str:
    """Escape the separators of container_mounts.py with backslashes."""
    return "".join("\\" + c if c in ",: $" else c for c in text)
