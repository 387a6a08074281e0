#pragma once

#include <filesystem>

#include "src/base/result.h"
#include "src/store/segment_store.h"

namespace rekindle::agent {

// `pull --to DIR`: the directory is filled through a small store inside it (so that an interrupted
// pull is resumed), and then turned into a plain checkpoint directory.
std::filesystem::path export_store(const std::filesystem::path& directory);  // DIR/.rekindle

// After a pull that failed: removes the inner store unless there is something in it to go on from.
// The store is still open, so that nobody else uses it.
void drop_unused_store(const std::filesystem::path& directory);

// Refuses a directory that holds weights which are not ours to replace.
Result<void> check_export_target(const std::filesystem::path& directory);

// Links the segments into DIR (where links are not to be had, moves them), writes the small files
// (config.json, tokenizer…), model.safetensors.index.json when there are several segments, and
// rekindle.manifest last; then removes the inner store. The store must be closed. A directory that
// was exported before is replaced file by file; one that was cut short in between goes on.
// kCorrupt: a file is not, or not any more, the one whose bytes have verified; then nothing vouches
// for DIR.
Result<void> export_checkpoint(const store::StoredVersion& stored,
                               const std::filesystem::path& directory);

}  // namespace rekindle::agent
