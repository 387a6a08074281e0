#pragma once

#include <cstdint>

namespace rekindle::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
inline constexpr bool kSanitized =
    __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
inline constexpr bool kSanitized = false;
#endif

// Of so many random cases, how many to try: a sanitizer makes each ten times slower.
constexpr std::uint64_t effort(std::uint64_t cases) { return kSanitized ? cases / 5 : cases; }

}  // namespace rekindle::testing
