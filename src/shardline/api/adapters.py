"""The LoRA adapters that requests may name: found, checked, and known by their content."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from shardline.config.engine import USUAL_ACCESS, HubAccess
from shardline.config.lora import LoRAConfig
from shardline.messages.request import AdapterRef
from shardline.models.spec import DecoderSpec


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for `LLM.generate` and others, as in vLLM: `lora_path` is the folder that PEFT has written, or a hub
    id.

    The number means nothing here: adapters are told apart by their content.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter under a name that requests use as their model."""

    name: str
    ref: AdapterRef
    parent: str = ""
    """The base model, as the user has named it; empty: the served one."""


class Adapters:
    """Adapters by name. Any thread may read files with it; names are changed by one thread."""

    def __init__(
        self, config: LoRAConfig, spec: DecoderSpec | None, hub: HubAccess = USUAL_ACCESS, *, experts: bool = True
    ) -> None:
        """`spec`: that of the base model. `hub`: where adapters are that are no folders. `experts`: see `read_adapter`.

        Raises:
            ValueError: one of the configured adapters cannot be used.
        """
        self._config = config
        self._spec = spec
        self._hub = hub
        self._experts = experts
        self._named: dict[str, NamedAdapter] = {}
        self._known: dict[str, tuple[object, AdapterRef]] = {}
        """By folder: what the files looked like when they were read, and what they hold."""
        self._lock = threading.Lock()
        for module in config.modules:
            try:
                self.put(module.name, self.read(module.folder), module.parent)
            except ValueError as error:
                raise ValueError(f"lora_modules {module.name}: {error}") from None

    @property
    def named(self) -> Mapping[str, NamedAdapter]:
        """Those that requests can name."""
        return self._named

    def read(self, folder: str) -> AdapterRef:
        """Check the adapter in a folder or of a hub id, and tell its content. Files that have not changed are not read
        again.

        Raises:
            ValueError: adapters are not enabled, or it cannot be used.
        """
        from shardline.checkpoints.adapter_targets import chosen_kinds
        from shardline.checkpoints.adapters import find_adapter, read_adapter, state_of

        if not self._config.enable_lora:
            raise ValueError("LoRA is not enabled: start with --enable-lora, or LLM(enable_lora=True)")
        assert self._spec is not None
        path = find_adapter(folder, self._hub)
        with self._lock:
            state = state_of(path)
            known = self._known.get(str(path))
            if known is not None and known[0] == state:
                return known[1]
            kinds = chosen_kinds(self._spec, self._config.targets)
            adapter = read_adapter(path, self._spec, self._config.max_lora_rank, kinds=kinds, experts=self._experts)
            ref = AdapterRef(adapter.digest(), str(path))
            self._known[str(path)] = state, ref
            return ref

    def find(self, digest: str) -> AdapterRef | None:
        """The adapter with this content, of those that have a name or that requests have brought."""
        with self._lock:
            refs = [*(named.ref for named in self._named.values()), *(ref for _, ref in self._known.values())]
        return next((ref for ref in refs if ref.digest == digest), None)

    def put(self, name: str, ref: AdapterRef, parent: str = "") -> None:
        """Let requests name an adapter that was read. A name that is taken is that of this adapter from now on."""
        self._named[name] = NamedAdapter(name, ref, parent)

    def remove(self, name: str) -> bool:
        """Forget a name; requests that run go on. Returns whether there was one."""
        return self._named.pop(name, None) is not None
