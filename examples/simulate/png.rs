//! Draws a chart as PNG with its own font, so that every machine draws the same.

use std::error::Error;
use std::sync::Arc;

use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::fontdb::Database;
use resvg::usvg::{Options, Tree};

/// Pixels for each unit of the chart, enough for high-resolution screens.
const SCALE: f32 = 2.0;

/// Draws `svg`.
///
/// # Errors
///
/// If `svg` is no SVG, or has no size.
pub(crate) fn png(svg: &str) -> Result<Vec<u8>, Box<dyn Error>> {
    let tree = tree(svg)?;
    let size = tree.size().to_int_size().scale_by(SCALE).ok_or("it is too large")?;
    let mut pixels = Pixmap::new(size.width(), size.height()).ok_or("it is too large")?;
    resvg::render(&tree, Transform::from_scale(SCALE, SCALE), &mut pixels.as_mut());
    Ok(pixels.encode_png()?)
}

/// Parses `svg`, with every text laid out.
pub(crate) fn tree(svg: &str) -> Result<Tree, Box<dyn Error>> {
    let mut fonts = Database::new();
    fonts.load_font_data(dejavu::sans_condensed::regular().to_vec());
    fonts.load_font_data(dejavu::sans_condensed::bold().to_vec());
    fonts.set_sans_serif_family("DejaVu Sans");
    Ok(Tree::from_str(svg, &Options { fontdb: Arc::new(fonts), ..Options::default() })?)
}
