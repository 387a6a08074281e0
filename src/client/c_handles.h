#pragma once

#include <memory>

#include "src/client/connection.h"
#include "src/client/publication.h"
#include "src/client/rekindle.h"
#include "src/client/session.h"

// A call takes its own share of the object, so that a handle may be closed while another thread's
// call still runs (calls that begin after it are the caller's mistake).
struct rk_agent {
  std::shared_ptr<rekindle::client::Connection> object;
  bool is_owner() const { return object->is_owner(); }
};

struct rk_session {
  std::shared_ptr<rekindle::client::Session> object;
  bool is_owner() const { return object->connection().is_owner(); }
};

struct rk_publication {
  std::shared_ptr<rekindle::client::Publication> object;
  bool is_owner() const { return object->connection().is_owner(); }
};
