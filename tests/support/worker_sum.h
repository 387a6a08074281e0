#pragma once

#include <cstdio>
#include <map>
#include <string>

#include <xxhash.h>

namespace rekindle::testing {

// What tests/proc/worker_main.cc says of the bytes that it was handed: XXH3-128 over names and
// bytes in the order of names. Computed by a library that nothing under test uses for tensors.
template <typename Bytes>
std::string worker_sum(const std::map<std::string, Bytes>& tensors) {
  XXH3_state_t* const state = XXH3_createState();
  XXH3_128bits_reset(state);
  for (const auto& [name, bytes] : tensors) {
    XXH3_128bits_update(state, name.data(), name.size());
    XXH3_128bits_update(state, bytes.data(), bytes.size());
  }
  const XXH128_hash_t sum = XXH3_128bits_digest(state);
  XXH3_freeState(state);
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(sum.high64),
                static_cast<unsigned long long>(sum.low64));
  return text;
}

}  // namespace rekindle::testing
