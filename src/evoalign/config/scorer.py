# SPDX-License-Identifier: Apache-2.0
"""Which models score pairs of prompt and response: in this process, or behind an address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from evoalign.config.base import Place, Section
from evoalign.config.outside import ADDRESS, INSIDE, MODEL, SECRET
from evoalign.errors import shown

SAFE_RLHF = "BEGINNING OF CONVERSATION: USER: {prompt} ASSISTANT:{response}"
"""The form in which the models of Safe RLHF read a pair (arXiv 2310.12773)."""
CHAT = "chat"
LEAST_TOKENS = 16
PROMPT, RESPONSE = "{prompt}", "{response}"


def _template(text: str) -> str:
    if text == CHAT:
        return text
    if text.count(PROMPT) != 1 or text.count(RESPONSE) != 1 or text.index(PROMPT) > text.index(RESPONSE):
        raise ValueError(f"write {CHAT}, or a text with {PROMPT} and, after it, {RESPONSE}, each of them once")
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
    "reward",
    "cost",
    "reward_revision",
    "cost_revision",
    "template",
    "max_tokens",
    "batch_size",
    "dtype",
    "device",
)
_SERVICE = ("url", "token_env", "timeout", "deadline", "concurrency")


class ScorerConfig(Section):
    """Models that score pairs of prompt and response: `local`, in this process, or the `service` of another one.

    A setting of the other kind is refused: a service was given its models, template and batches where it was started,
    by `evoalign score serve`.
    """

    name: Literal["local", "service"]
    """`local`: `scorer.reward` and those up to `scorer.device` are read. `service`: `scorer.url` and those after it."""
    reward: Annotated[Place | None, MODEL] = None
    """Folder or hub name of the model whose score is the reward."""
    cost: Annotated[Place | None, MODEL] = None
    """Folder or hub name of the model whose score is the cost, where there is one: more is worse, above 0 is unsafe."""
    reward_revision: Annotated[Revision | None, INSIDE] = Field(default=None, exclude_if=lambda value: value is None)
    """Branch, tag or commit of a reward model of the hub; None: its newest. Written down only where it is set."""
    cost_revision: Annotated[Revision | None, INSIDE] = Field(default=None, exclude_if=lambda value: value is None)
    """The same of the cost model."""
    template: Annotated[Template, INSIDE] = SAFE_RLHF
    """How a pair becomes text: with `{prompt}` and `{response}` in it, to which the end token is added; the default is
    that of Safe RLHF. `chat` takes the scoring model's own chat template."""
    max_tokens: MaxTokens = 2048
    """Tokens of a pair, the template and the end token among them. Of a longer one the response loses its end; it keeps
    a quarter of this, and then the prompt loses its beginning."""
    batch_size: BatchSize = 16
    """Pairs in one forward pass, of about the same length."""
    dtype: Dtype = "auto"
    """Of the models' weights. auto: float32 on the CPU, bfloat16 on a GPU. A linear score head is always in float32."""
    device: Annotated[Device, INSIDE] = "auto"
    """auto: a GPU if there is one."""
    url: Annotated[Annotated[str, Field(pattern=r"^https?://[^\s/@]+(/[^\s@]*)?$")] | None, ADDRESS] = None
    """Address of the service, such as http://127.0.0.1:8011."""
    token_env: Annotated[Variable | None, SECRET] = None
    """Name of the environment variable that holds the service's token. It is not sent over plain http to another
    machine."""
    timeout: Seconds = 60.0
    """Seconds for one request, from connecting to the last byte of its answer, after which it is sent again."""
    deadline: Seconds = 600.0
    """Seconds without any scores, while some are asked for, after which the run stops. Until then a request that fails
    is sent again; a last one is sent at the deadline. No request takes longer than this."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 8
    """Requests in flight at once."""

    resources: ClassVar[frozenset[str]] = frozenset({"batch_size", "device", "dtype", *_SERVICE})
    """Settings that a run may have to change to go on elsewhere. They decide at most the last bits of a score, but for
    `dtype`, which the digest of the models guards: what `auto` was on one machine has a name on another."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What models of this process give a pair, each by the model of that setting."""
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
                    f"scorer.{key} {shown(given[key])} is of scorer.name {other}, and scorer.name is {name}: leave "
                    f"scorer.{key} out, or set it to null over another file, or set scorer.name: {other}"
                )
        return {key: value for key, value in given.items() if key not in others}

    @model_validator(mode="after")
    def _has_one(self) -> ScorerConfig:
        needed = "reward" if self.name == "local" else "url"
        if getattr(self, needed) is None:
            raise ValueError(f"set scorer.{needed}, which scorer.name {self.name} needs")
        if self.cost_revision is not None and self.cost is None:
            raise ValueError("scorer.cost_revision is of scorer.cost, which is not set; set it, or leave this out")
        return self

    @model_serializer(mode="wrap")
    def _own(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the settings of the other kind, which would be refused as it is read again."""
        others = _SERVICE if self.name == "local" else _LOCAL
        return {name: value for name, value in handler(self).items() if name not in others}
