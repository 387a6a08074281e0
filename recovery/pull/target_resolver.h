#pragma once

#include <memory>
#include <string>

#include "recovery/pull/pull_context.h"
#include "recovery/pull/source_pool.h"
#include "recovery/pull/wanted.h"
#include "src/async/task.h"
#include "src/store/segment_store.h"

namespace rekindle::pull {

// Finds out what a pull wants (PullTarget): which version with which root, what it consists of, and
// which boxes of it. The coordinator or the peers of --from say so first; where nobody can be
// asked, copies in the own store or the fallback directory do. Control thread only.
class TargetResolver {
 public:
  TargetResolver(PullContext& context, SourcePool& sources, const WantedSpec& wanted);

  // The version and its root. kCorrupt: the request names another root.
  async::Task<Result<void>> resolve();
  // Its checkpoint, the wanted boxes and their layout here.
  async::Task<Result<void>> find_wanted();

 private:
  bool has_been_asked(const Error& answer) const;
  void take_from_store();
  async::Task<Result<void>> take_from_fallback();
  Result<void> check_root() const;
  // Exactly the boxes of a copy that is set aside.
  Result<void> take_layout(const store::SetAside& copy);
  async::Task<Result<void>> learn_checkpoint();
  async::Task<Result<void>> learn_from(std::shared_ptr<SourcePeer> peer);
  async::Task<Result<std::string>> read_config();

  PullContext& context_;
  SourcePool& sources_;
  const WantedSpec& wanted_;
  PullTarget& target_;
};

}  // namespace rekindle::pull
