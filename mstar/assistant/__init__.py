"""The voice assistant: a listener, a language model and a speaker as one model in one engine."""
