"""Where prompts come from and what completions are worth; torch-free, and graded in processes that can be killed."""

from flatout.tasks.base import Message, Messages, Task, Texts, Worked
from flatout.tasks.grader import Graded, Grader
from flatout.tasks.specs import asking, open_task

__all__ = ["Graded", "Grader", "Message", "Messages", "Task", "Texts", "Worked", "asking", "open_task"]
