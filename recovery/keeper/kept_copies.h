#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"

// What a keeper holds: docs/internals/resident.md.
namespace rekindle::keeper {

// The keeper's number of one process that uses one copy; never used again.
using UserId = std::uint64_t;

inline constexpr std::size_t kMostCopies = 1024;
// Of all copies.
inline constexpr std::size_t kMostBlocks = 16'384;
// Of all copies.
inline constexpr std::uint64_t kMostRecordBytes = 256u << 20;
// The copies of one user (uid) take at most this part of each of the limits above.
inline constexpr std::size_t kOwnersShare = 4;
// Of one copy.
inline constexpr std::size_t kMostUsers = 64;

struct KeptCopy {
  std::string record;
  std::vector<UniqueFd> blocks;
  std::chrono::milliseconds time_to_live{};
  // The uid whose share of the keeper it takes.
  std::uint32_t owner = 0;
  std::set<UserId> users = {};
  // When it goes, unless a process uses it before. nullopt: it has users.
  std::optional<TimePoint> expires = std::nullopt;
};

// The copies, their users and their times. Pure: the caller passes the time and watches the users.
class KeptCopies {
 public:
  // `first_user`: different for each keeper, so that an agent never takes a number of one keeper
  // for that of another.
  explicit KeptCopies(UserId first_user = 1) : last_user_(first_user) {}
  // Without users. kInvalid: there is a copy of this name, or it has no block. kExhausted.
  Result<void> keep(const std::string& name, KeptCopy copy, TimePoint now);
  // One more user. kNotFound; kExhausted.
  Result<UserId> add_user(const std::string& name);
  // Returns the name of its copy; nullopt: there is no such user.
  std::optional<std::string> remove_user(UserId user, TimePoint now);
  // kNotFound.
  Result<void> drop(const std::string& name);
  // nullptr: there is none.
  const KeptCopy* find(const std::string& name) const;
  // Drops the copies whose time is over, and returns their names.
  std::vector<std::string> expire(TimePoint now);
  std::optional<TimePoint> next_expiry() const;
  const std::map<std::string, KeptCopy>& all() const { return copies_; }

 private:
  struct Held {
    std::size_t copies = 0;
    std::size_t blocks = 0;
    std::uint64_t record_bytes = 0;
  };
  // Of all owners; of one.
  Held held(std::optional<std::uint32_t> owner) const;

  std::map<std::string, KeptCopy> copies_;
  std::map<UserId, std::string> users_;
  UserId last_user_;
};

}  // namespace rekindle::keeper
