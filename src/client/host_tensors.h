#pragma once

#include <cstddef>
#include <deque>
#include <span>
#include <vector>

#include "src/bucket/contents.h"
#include "src/client/mapping.h"
#include "src/client/rekindle.h"

namespace rekindle::client {

// Every piece, without data. The texts and lists belong to `contents`.
std::vector<rk_tensor> describe_pieces(const bucket::Contents& contents);
// Every tensor of the whole version, likewise.
std::vector<rk_tensor> describe_version(const bucket::Contents& contents);

// A session's tensors in host memory: in place in the agent's segments, or as copies of boxes that
// do not lie contiguously there. Both stay mapped as long as this object lives. One thread at a
// time.
class HostTensors {
 public:
  explicit HostTensors(std::vector<Mapping> segments);

  // The pieces at these indexes, with their data. kExhausted: there is no memory for a copy.
  Result<std::vector<rk_tensor>> make(const bucket::Contents& contents,
                                      std::span<const std::size_t> pieces);

 private:
  Result<rk_tensor> make_one(const bucket::Contents& contents, const bucket::Piece& piece);

  std::vector<Mapping> segments_;
  // Where each segment begins.
  std::vector<const std::byte*> data_;
  std::deque<Mapping> copies_;
};

}  // namespace rekindle::client
