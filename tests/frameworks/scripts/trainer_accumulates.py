"""The Trainer with gradient accumulation and bf16."""

from small import arguments, model, texts, tokenizer, train
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

known = tokenizer()
rows = texts().map(lambda row: known(row["text"]), remove_columns=["text"])
settings = arguments(TrainingArguments, gradient_accumulation_steps=4, per_device_train_batch_size=2, bf16=True)
train(
    Trainer, model(), args=settings, train_dataset=rows, data_collator=DataCollatorForLanguageModeling(known, mlm=False)
)
