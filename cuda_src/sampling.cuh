// A sequence's settings and adjustments as the host writes them (samir_vllm/backends/reference_sampler.py).
#pragma once

#include "common.cuh"

struct __align__(16) Settings {
    float scale;  // log2(e) / temperature; 0: the greatest logit
    float min_p;
    unsigned int top_k;  // 0: all
    unsigned int index;  // which of the request's answers
    unsigned long long top_p;  // in units of 2^-32
    unsigned long long seed;
    float repetition, presence, frequency;
    int min_tokens;
    unsigned int table;  // of its adjustments, counted from 1; 0: none
    int padding[3];
};

// What changes the logit of one token. The first of a table is its head: entries behind it, output tokens counted.
struct __align__(16) Adjustment {
    int id;  // head: number of entries
    int state;  // IN_PROMPT, ENDS_ANSWER, and the count in the output times ONE_OUTPUT; head: outputs counted
    float bias;
    float raw;  // the logit as it was
};

constexpr int IN_PROMPT = 1, ENDS_ANSWER = 2, ONE_OUTPUT = 4;
