// PyTorch's thread pool, found at run time.
#pragma once
#include <string>

namespace regard {

// Looks up the pool in an already loaded library; false when it has none.
bool open_pool(const std::string& library);
int threads();
// Calls work(worker, context) for worker = 0 .. workers-1, each once, on up to that many threads.
void parallel(int workers, void (*work)(int worker, void* context), void* context);

}  // namespace regard
