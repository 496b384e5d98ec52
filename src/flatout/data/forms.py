"""Plain-text forms of a question and its answer, for models without a chat template.

Rows of questions or instructions are written out in them. A model that was trained on a form gets it as its chat
template, so that chat, the endpoint, evaluation and other programs ask in the same words.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Form:
    """A question stands between `ask` and `answer`; `space` goes before the answer, EOS after it."""

    ask: str
    answer: str
    space: str
    stops: tuple[str, ...]  # where a model that does not end would ask itself another question

    def written(self, question: str) -> str:
        return f"{self.ask}{question}{self.answer}"

    @property
    def body(self) -> str:
        """The template without what begins a text."""
        ask, answer, space = map(json.dumps, (self.ask, self.answer, self.space))
        between = "'\\n\\n' if loop.index0 and messages[loop.index0 - 1]['role'] == 'assistant' else ''"
        return (
            "{% for message in messages %}{% if message['role'] == 'assistant' %}"
            f"{{{{ {space} + message['content'] + eos_token }}}}"
            "{% elif message['role'] == 'user' %}"
            f"{{{{ ({between}) + {ask} + message['content'] + {answer} }}}}"
            "{% else %}{{ message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
        )

    def template(self, *, begin: str) -> str:
        """A chat template; `begin` is the text of the tokens that begin a text."""
        return (f"{{{{ {json.dumps(begin)} }}}}" if begin else "") + self.body


QUESTION = Form(ask="Question: ", answer="\nAnswer:", space=" ", stops=("\nQuestion:", "\n\nQuestion:"))
INSTRUCTION = Form(
    ask="### Instruction:\n",
    answer="\n\n### Response:\n",
    space="",
    stops=("\n### Instruction:", "\n\n### Instruction:"),
)
FORMS = {"question": QUESTION, "instruction": INSTRUCTION}


def form_of(prompt: str) -> str | None:
    """The name of the form that a prompt has, with or without texts before the question. It asks only once."""
    for name, form in FORMS.items():
        asked = re.findall(rf"^{re.escape(form.ask)}", prompt, re.MULTILINE)
        if len(asked) == 1 and prompt.endswith(form.answer):
            return name
    return None


def form_in(template: str | None) -> Form | None:
    """The form that a chat template is of, if it is one of ours."""
    return next((form for form in FORMS.values() if template is not None and template.endswith(form.body)), None)
