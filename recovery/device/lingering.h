#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "recovery/device/segment_cache.h"
#include "src/base/clock.h"
#include "src/base/unique_fd.h"

namespace rekindle::device {

// Segments of copies that are gone. A store keeps their files for the next copy of the same layout
// (docs/store.md): while a file has its name it stays mapped and pinned here, so that the copy
// which takes it finds that done. One thread.
class Lingering {
 public:
  // `let_go`: unpins; takes seconds, so elsewhere.
  explicit Lingering(std::function<void(std::vector<Segment>)> let_go)
      : let_go_(std::move(let_go)) {}

  // `files[i]` is open on segments[i].
  void add(std::vector<Segment> segments, std::vector<UniqueFd> files, TimePoint now);
  // Lets go of those whose file has lost its name, that somebody else has again, and that are
  // here for long. When to look next; nullopt: there are none.
  std::optional<TimePoint> look(TimePoint now);

 private:
  struct One {
    Segment segment;
    UniqueFd file;
    TimePoint until;
  };
  const std::function<void(std::vector<Segment>)> let_go_;
  std::vector<One> all_;
};

}  // namespace rekindle::device
