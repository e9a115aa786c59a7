"""The LoRA adapters that administrators load and unload at run time, by OpenAI's routes or the repository API."""

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.calls import note_model
from sluice.pipelines.llm.model import LlmModel, language_models
from sluice.pipelines.llm.text_models import SEPARATOR, find_owner
from sluice.serving.repository.managed_model import IndexEntry, ModelState
from sluice.serving.repository.repository import ModelRepository

FLAG = "--allow-runtime-lora-updating"
MAX_PATH_CHARS = 4096


class RuntimeAdapters:
    """Changes the adapters of the language models of `repository`, each in its latest version."""

    def __init__(self, repository: ModelRepository, *, is_allowed: bool) -> None:
        self._repository = repository
        self._is_allowed = is_allowed

    def _models(self) -> list[LlmModel]:
        return language_models(self._repository.models())

    async def load(self, name: str, path: str, base: str = "", *, replaces: bool) -> str:
        """Load the adapter in the folder `path`, and return its full name, MODEL:NAME. `name` is that one, or NAME
        alone where `base` says the model, or there is only one. Raises FORBIDDEN where adapters are fixed, INVALID for
        a name that is taken, unless the adapter `replaces` that one, and the engine's error for one that it does not
        take; nothing has changed then."""
        self._refuse_unless_allowed()
        model, adapter = self._split(name, base)
        if not path.isprintable() or not 0 < len(path) <= MAX_PATH_CHARS:
            problem = f"lora_path must be a path of 1 to {MAX_PATH_CHARS} printable characters, got {path[:40]!r}"
            raise invalid("lora_path", problem)
        await model.engine.load_adapter(adapter, path, replaces=replaces)
        return f"{model.name}{SEPARATOR}{adapter}"

    async def unload(self, name: str, base: str = "") -> str:
        """Remove an adapter, and return its full name. Requests in flight with it end as usual. Raises as `load`, and
        NOT_FOUND for an unknown one."""
        self._refuse_unless_allowed()
        model, adapter = self._split(name, base)
        await model.engine.unload_adapter(adapter)
        return f"{model.name}{SEPARATOR}{adapter}"

    def is_known(self, name: str) -> bool:
        """Whether `name` means a loaded adapter: MODEL:NAME; or NAME alone, where only one model has it."""
        return self.base_of(name) is not None or find_owner(self._models(), name) is not None

    def base_of(self, name: str) -> str | None:
        """Return the model of the adapter MODEL:NAME; None where there is no such adapter."""
        names = ((each.name, adapter) for each in self._models() for adapter in each.text.info.adapters)
        return next((base for base, adapter in names if f"{base}{SEPARATOR}{adapter}" == name), None)

    def index(self) -> list[IndexEntry]:
        """Return a row for each adapter, by full names, as versions of their models have them."""
        return [
            IndexEntry(f"{model.name}{SEPARATOR}{adapter}", model.version, ModelState.READY)
            for model in self._models()
            for adapter in model.text.info.adapters
        ]

    def _refuse_unless_allowed(self) -> None:
        if not self._is_allowed:
            raise SluiceError(ErrorCode.FORBIDDEN, f"LoRA adapters are fixed on this server; start it with {FLAG}")

    def _split(self, name: str, base: str) -> tuple[LlmModel, str]:
        """Return model and adapter. Raises INVALID for an adapter whose model is not clear."""
        models = {model.name: model for model in self._models()}
        known = ", ".join(models) or "none"
        if base and base not in models:
            raise invalid("base_model_name", f"base_model_name must be one of {known}, got {base[:200]!r}")
        prefixes = (each for each in ((base,) if base else models) if name.startswith(each + SEPARATOR))
        found = max(prefixes, key=len, default=None)
        adapter = name if found is None else name.removeprefix(found + SEPARATOR)
        owner = found or base or find_owner(models.values(), name) or (next(iter(models)) if len(models) == 1 else "")
        if not owner or adapter in models:
            raise invalid("lora_name", f"lora_name must be MODEL:NAME, got {name!r}; language models: {known}")
        if not adapter.isprintable() or not adapter or SEPARATOR in adapter or " " in adapter:
            raise invalid("lora_name", f"an adapter's name must have no blanks and no colon, got {adapter!r}")
        note_model(owner, adapter)
        return models[owner], adapter
