# SPDX-License-Identifier: Apache-2.0
"""The section `scorer`: models that score pairs of prompt and response, in this process or as a service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from evoalign.config.base import Place, Section
from evoalign.config.outside import ADDRESS, INSIDE, MODEL, SECRET
from evoalign.errors import shown

SAFE_RLHF = "BEGINNING OF CONVERSATION: USER: {prompt} ASSISTANT:{response}"
"""Template of the Safe RLHF models (arXiv 2310.12773)."""
CHAT = "chat"
LEAST_TOKENS = 16
PROMPT, RESPONSE = "{prompt}", "{response}"
DIGEST = "X-Scorer-Digest"
"""Header of each response with the hash of everything that its scores depend on."""


def _template(text: str) -> str:
    if text == CHAT:
        return text
    if text.count(PROMPT) != 1 or text.count(RESPONSE) != 1 or text.index(PROMPT) > text.index(RESPONSE):
        raise ValueError(f"write {CHAT}, or a text with {PROMPT} and after it {RESPONSE}, each exactly once")
    return text


Template = Annotated[str, AfterValidator(_template)]
MaxTokens = Annotated[int, Field(ge=LEAST_TOKENS, le=10**6)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
BatchSize = Annotated[int, Field(ge=1, le=10**5)]
Seconds = Annotated[float, Field(ge=0.1, le=10**6, allow_inf_nan=False)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

Revision = Annotated[str, Field(min_length=1)]

_LOCAL = (
    "reward", "cost", "reward_revision", "cost_revision", "template", "max_tokens", "batch_size", "dtype", "device",
)  # fmt: skip
_SERVICE = ("url", "token_env", "timeout", "deadline", "concurrency")


class ScorerConfig(Section):
    """Models that score pairs of prompt and response: `local`, in this process, or a `service`.

    Settings of the other kind are rejected: `evoalign score serve` sets the models, template and batches of a service.
    """

    name: Literal["local", "service"]
    """`local` uses `scorer.reward` to `scorer.device`; `service` uses `scorer.url` and the settings after it."""
    reward: Annotated[Place | None, MODEL] = None
    """Folder or hub name of the reward model."""
    cost: Annotated[Place | None, MODEL] = None
    """Folder or hub name of the cost model: a higher cost is worse, above 0 is unsafe. None: no cost."""
    reward_revision: Annotated[Revision | None, INSIDE] = Field(default=None, exclude_if=lambda value: value is None)
    """Branch, tag or commit of a reward model on the hub; None: the newest. Recorded only if set."""
    cost_revision: Annotated[Revision | None, INSIDE] = Field(default=None, exclude_if=lambda value: value is None)
    """Branch, tag or commit of the cost model."""
    template: Annotated[Template, INSIDE] = SAFE_RLHF
    """Template of a pair, with `{prompt}` and `{response}`; the end token is appended. The default is that of Safe
    RLHF. `chat` uses the scoring model's chat template."""
    max_tokens: MaxTokens = 2048
    """Maximum tokens of a pair, including the template and the end token. In a longer pair, the end of the response is
    truncated, down to a quarter of this, and then the beginning of the prompt."""
    batch_size: BatchSize = 16
    """Pairs per forward pass, of similar length."""
    dtype: Dtype = "auto"
    """Dtype of the weights. auto: float32 on the CPU, bfloat16 on a GPU. A linear score head is always float32."""
    device: Annotated[Device, INSIDE] = "auto"
    """auto: a GPU if there is one."""
    url: Annotated[Annotated[str, Field(pattern=r"^https?://[^\s/@]+(/[^\s@]*)?$")] | None, ADDRESS] = None
    """Address of the service, such as http://127.0.0.1:8011."""
    token_env: Annotated[Variable | None, SECRET] = None
    """Environment variable with the service's token. The token is not sent over plain http to another machine."""
    timeout: Seconds = 60.0
    """Seconds for one request, from connecting to the last byte of the response; then it is retried."""
    deadline: Seconds = 600.0
    """Seconds without any scores, while there are requests, until the run stops. Until then failed requests are
    retried, once more at the deadline. No request takes longer than this."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 8
    """Concurrent requests."""

    resources: ClassVar[frozenset[str]] = frozenset({"batch_size", "device", "dtype", *_SERVICE})
    """Settings that may change when a run resumes on another machine. They affect at most the last bits of a score,
    except `dtype`, which the digest of the models includes."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the scores of local models."""
        return ("reward",) if self.cost is None else ("reward", "cost")

    @model_validator(mode="before")
    @classmethod
    def _of_one_kind(cls, tree: object) -> object:
        if not isinstance(tree, Mapping):
            return tree
        given = cast("Mapping[str, Any]", tree)
        name = given.get("name")
        others, other = {"local": (_SERVICE, "service"), "service": (_LOCAL, "local")}.get(str(name), ((), ""))
        for key in others:
            if given.get(key) is not None:
                raise ValueError(
                    f"scorer.{key} {shown(given[key])} belongs to scorer.name {other}, but scorer.name is {name}: "
                    f"remove scorer.{key}, or set it to null to override another file, or set scorer.name: {other}"
                )
        return {key: value for key, value in given.items() if key not in others}

    @model_validator(mode="after")
    def _has_one(self) -> ScorerConfig:
        needed = "reward" if self.name == "local" else "url"
        if getattr(self, needed) is None:
            raise ValueError(f"scorer.name {self.name} needs scorer.{needed}; set it")
        if self.cost_revision is not None and self.cost is None:
            raise ValueError("scorer.cost_revision needs scorer.cost; set it, or remove scorer.cost_revision")
        return self

    @model_serializer(mode="wrap")
    def _own(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the settings of the other kind, which parsing would reject."""
        others = _SERVICE if self.name == "local" else _LOCAL
        return {name: value for name, value in handler(self).items() if name not in others}
