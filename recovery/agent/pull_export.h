#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "src/base/result.h"
#include "src/store/segment_store.h"

namespace rekindle::agent {

// `pull --to DIR` fills the directory through a small store inside it, so that an interrupted pull
// resumes. Then it turns it into a plain checkpoint directory. The inner store is DIR/.rekindle.
std::filesystem::path export_store(const std::filesystem::path& directory);

// Removes the inner store after a pull that failed, unless a later pull can go on from it. The
// store is still open, so that nobody else uses it.
void drop_unused_store(const std::filesystem::path& directory);

// Refuses a directory with weights that Rekindle has not put there.
Result<void> check_export_target(const std::filesystem::path& directory);

// Links the segments into DIR, or moves them where links are impossible. Writes the small files
// (config.json, tokenizer…), model.safetensors.index.json when there are several segments, and
// rekindle.manifest last; then removes the inner store. The store must be closed. The files of an
// earlier export are replaced one by one; an export that was cut short continues. kCorrupt: a file
// is not the one whose bytes were verified, and DIR cannot be trusted. kDenied: a symbolic link is
// in the way. Returns the files with code, which are left out unless `allow_code`.
Result<std::vector<std::string>> export_checkpoint(const store::StoredVersion& stored,
                                                   const std::filesystem::path& directory,
                                                   bool allow_code);

}  // namespace rekindle::agent
