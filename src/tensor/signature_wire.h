#pragma once

#include <span>
#include <vector>

#include "proto/common.pb.h"
#include "src/tensor/version_signature.h"

namespace rekindle {

using SignatureMessages = google::protobuf::RepeatedPtrField<proto::VersionSignature>;

SignatureMessages to_proto(std::span<const VersionSignature> signatures);
// The first kMaxSignatures that have the right sizes. Nobody has verified them yet.
std::vector<VersionSignature> from_proto(const SignatureMessages& messages);

}  // namespace rekindle
