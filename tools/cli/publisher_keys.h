#pragma once

#include <string>
#include <vector>

#include "src/base/result.h"
#include "src/crypto/signing_key.h"
#include "src/tensor/version_signature.h"
#include "tools/cli/command_line.h"

// The keys of publishers, which options name. `rekindle keys` makes them.
namespace rekindle::cli {

// The private key of --sign-key. kDenied: other users may read the file.
Result<crypto::SigningKey> read_sign_key(const std::string& path);
// The values of --trust-publisher: [MODELS=]FILE, where the file has one or several public keys.
Result<PublisherTrust> read_trust(const std::vector<std::string>& values);
void add_trust_option(Command& command, std::vector<std::string>& values);

}  // namespace rekindle::cli
