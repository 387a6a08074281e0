#pragma once

#include <functional>

#include "src/base/result.h"

namespace rekindle::store {

// Runs `body` so that a SIGBUS or an EFAULT-like access to a mapping whose file was truncated
// becomes kCorrupt instead of a crash. `body` must not own resources across the access (it is left
// by longjmp): digesting and copying bytes only. Any thread; nests. SIGBUS from elsewhere keeps its
// old handler.
Result<void> guard_mapping_access(const char* what, const std::function<void()>& body);

// The same for a body that touches more than one mapping: the address whose access failed, nullptr
// when none did.
Result<const void*> find_mapping_fault(const std::function<void()>& body);

}  // namespace rekindle::store
