"""From samples to micro-batches: conversion, schedule over data-parallel ranks, load balance, context-parallel slices.

Pure functions of their arguments; no process groups, no devices. This file imports nothing.
"""
