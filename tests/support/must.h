#pragma once

#include <stdexcept>
#include <type_traits>
#include <utility>

#include "src/base/result.h"

namespace rekindle {

// The value of a result that a test takes for granted. Throws std::runtime_error with the message
// of its error.
template <typename T>
T must(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().message());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

}  // namespace rekindle
