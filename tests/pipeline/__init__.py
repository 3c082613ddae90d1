"""Tests of the whole pipeline: real processes, mock engine, real HTTP."""
