#pragma once

#include <set>
#include <span>
#include <string>
#include <vector>

#include "transport/path.h"

namespace rekindle::pull {

struct TransportChoice {
  std::string forced;  // the only one; "": the best that works
  bool same_host = false;
  std::set<std::string> used;   // have worked with this source
  std::set<std::string> avoid;  // do not work with this source
};

// What to ask a source for, best first. One that was used is asked for although it is of no use
// right now: so its loss is noticed and said, and it is taken again when it is back.
std::vector<std::string> transports_for(const TransportChoice& choice,
                                        std::span<transport::HandshakeConnector* const> handshakes);

}  // namespace rekindle::pull
