"""Tasks: prompts and rewards for completions, without torch, graded in processes that can be killed."""

from flatout.tasks.base import Levelled, Measured, Message, Messages, Named, Task, Texts, Worked
from flatout.tasks.grader import Graded, Grader
from flatout.tasks.specs import by_domain, open_task, with_prompt

__all__ = [
    "Graded",
    "Grader",
    "Levelled",
    "Measured",
    "Message",
    "Messages",
    "Named",
    "Task",
    "Texts",
    "Worked",
    "by_domain",
    "open_task",
    "with_prompt",
]
