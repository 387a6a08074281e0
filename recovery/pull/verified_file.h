#pragma once

#include <string>
#include <string_view>

#include "src/base/result.h"
#include "src/tensor/held_tile.h"

// The small files of a checkpoint (config.json, tokenizer…) travel as tensors. Outside of a
// transfer they are read with these functions, which compare them with the publisher's digests.
namespace rekindle::pull {

// kCorrupt unless `content` is the file that this tensor carries. Any thread.
Result<void> check_file(const Checkpoint& checkpoint, TensorIndex tensor, std::string_view content);

// Copies the file out of a mapped copy and checks it. Survives a segment that is truncated under
// its mapping. kNotFound: the layout does not hold the whole file. Any other error: this copy of
// the file cannot be used; another one may.
Result<std::string> read_verified_file(const Checkpoint& checkpoint, const Layout& layout,
                                       TensorIndex tensor, const ArrayOf& array_of);

}  // namespace rekindle::pull
