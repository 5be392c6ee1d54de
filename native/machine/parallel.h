// PyTorch's thread pool, looked up at run time so that the core does not link to PyTorch.
#pragma once
#include <string>

namespace regard {

// Looks up the pool's functions in a library that is already loaded. Returns false if they are missing.
bool open_pool(const std::string& library);
// Returns the pool's number of threads; 1 without a pool or in a forked child.
int threads();
// Calls work(worker, context) once for each worker in [0, workers), on up to `workers` threads.
void parallel(int workers, void (*work)(int worker, void* context), void* context);

}  // namespace regard
