"""Answers that are bound to a list of choices, a regular expression, a JSON schema or a grammar."""

from pegainfer import LLM, SamplingParams, StructuredOutputsParams

CAR = {
    "type": "object",
    "properties": {
        "brand": {"type": "string", "maxLength": 20},
        "model": {"type": "string", "maxLength": 20},
        "car_type": {"enum": ["sedan", "SUV", "truck", "coupe"]},
    },
    "required": ["brand", "model", "car_type"],
}
SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
EMAIL = "Make up an email address for Alan Turing, who works at Enigma. End it in .com.\n"
TASKS = {
    "Choice": (StructuredOutputsParams(choice=["Positive", "Negative"]),
               "Classify this sentiment: this engine is wonderful!"),
    "Regex": (StructuredOutputsParams(regex=r"[a-z0-9.]{1,20}@\w{6,10}\.com\n"), EMAIL),
    "JSON": (StructuredOutputsParams(json=CAR),
             "Describe the most iconic car of the 90's as JSON with its brand, model and car_type."),
    "Grammar": (StructuredOutputsParams(grammar=SQL),
                "Write an SQL query for the column 'col_1' where it is 1 in 'table_1'."),
}  # fmt: skip


def main() -> None:
    llm = LLM(model="SmolLM2-135M-Instruct", max_model_len=1024)
    for title, (structured_outputs, prompt) in TASKS.items():
        sampling_params = SamplingParams(
            temperature=0.0, max_tokens=100, structured_outputs=structured_outputs
        )
        outputs = llm.generate(prompts=prompt, sampling_params=sampling_params)
        print(f"{title}: {outputs[0].outputs[0].text.strip()}")


if __name__ == "__main__":
    main()
