#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <utility>

#include "src/base/digest.h"

namespace rekindle::agent {

// The last few serialized blobs that peers page through, so that 4 MiB pages of a 30 MB tensor list
// do not serialize it again each time. Control thread only.
class PageCache {
 public:
  struct Key {
    int kind = 0;
    Digest digest;
    std::string name;
    bool operator==(const Key&) const = default;
  };

  std::shared_ptr<const std::string> find(const Key& key) {
    for (auto it = blobs_.begin(); it != blobs_.end(); ++it) {
      if (it->first == key) {
        blobs_.splice(blobs_.begin(), blobs_, it);
        return blobs_.front().second;
      }
    }
    return nullptr;
  }
  std::shared_ptr<const std::string> insert(Key key, std::string blob) {
    blobs_.emplace_front(std::move(key), std::make_shared<const std::string>(std::move(blob)));
    if (blobs_.size() > kBlobsKept) blobs_.pop_back();
    return blobs_.front().second;
  }

 private:
  static constexpr std::size_t kBlobsKept = 6;
  std::list<std::pair<Key, std::shared_ptr<const std::string>>> blobs_;
};

}  // namespace rekindle::agent
