"""Voices: text to speech by ONNX graphs."""
