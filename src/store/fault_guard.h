#pragma once

#include <functional>

#include "src/base/result.h"

namespace rekindle::store {

// Runs `body`. Its access to a mapping whose file was truncated (SIGBUS) becomes kCorrupt instead
// of a crash. A longjmp leaves `body`, so it must own no resources: it only digests and copies
// bytes. Any thread; nests. A SIGBUS from elsewhere goes to the old handler.
Result<void> guard_mapping_access(const char* what, const std::function<void()>& body);

// The same for a body that touches more than one mapping. Returns the address whose access failed;
// nullptr: none.
Result<const void*> find_mapping_fault(const std::function<void()>& body);

}  // namespace rekindle::store
