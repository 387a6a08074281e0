#pragma once

#include <string>
#include <string_view>

#include "src/base/result.h"
#include "src/tensor/held_tile.h"

// The small files of a checkpoint (config.json, tokenizer…) travel as tensors. Whoever reads one
// outside of a transfer compares it with its leaves here, whichever state the copy is in.
namespace rekindle::pull {

// kCorrupt unless `content` is the file that this tensor carries. Any thread.
Result<void> check_file(const Checkpoint& checkpoint, TensorIndex tensor, std::string_view content);

// Copies the file out of a mapped copy and checks it. Survives a file that is truncated under its
// mapping. kNotFound: the layout does not hold the file whole. Any other error: this copy of it
// cannot be used, another one may.
Result<std::string> read_verified_file(const Checkpoint& checkpoint, const Layout& layout,
                                       TensorIndex tensor, const ArrayOf& array_of);

}  // namespace rekindle::pull
