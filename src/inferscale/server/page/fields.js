// What people type into forms.

/** The metadata in a field; an empty field means none. */
export function metadataOf(text) {
  if (!text.trim()) return {};
  let value = null;
  try {
    value = JSON.parse(text);
  } catch {
    // Said below.
  }
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new Error('Metadata is a JSON object, such as {"source": "mail"}.');
  }
  return value;
}
