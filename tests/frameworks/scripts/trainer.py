"""The Trainer of transformers, padding to the longest row."""

from small import arguments, model, texts, tokenizer, train
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

known = tokenizer()
rows = texts().map(lambda row: known(row["text"]), remove_columns=["text"])
settings = arguments(TrainingArguments)
train(
    Trainer, model(), args=settings, train_dataset=rows, data_collator=DataCollatorForLanguageModeling(known, mlm=False)
)
