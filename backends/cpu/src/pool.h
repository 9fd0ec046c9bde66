// Threads that help with chunks of a job. The caller starts at once and does whatever nobody else took, so a helper
// that wakes late, or whose core is busy, costs nothing but its help.
#pragma once

#include <cstdint>

using Work = void (*)(const void* job, int64_t chunk);

// Runs work(job, 0 .. chunks - 1) on the caller and at most ``threads - 1`` helpers; returns when all are done.
// One caller at a time: others wait for it.
void run_chunks(Work work, const void* job, int64_t chunks, int threads);
